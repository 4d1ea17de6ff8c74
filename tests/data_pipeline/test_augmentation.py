"""TinyBERT's data augmentation: words and their candidates, copies, word vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers.models.bert.tokenization_bert_legacy import BasicTokenizer

from data_pipeline import DataError
from data_pipeline.augmentation.replacement import (
    Replacement,
    Sentence,
    Word,
    is_english,
    is_word,
    replaceable,
)
from data_pipeline.augmentation.word_vectors import WordVectors

PIECES = ["[UNK]", "the", "cat", "sat", "don", "'", "t", "un", "##happy", "cafe", ",", "on", "mat"]
TEXT = "The unhappy CAT sat, café  don't  on 2 mats"


def word_piece() -> tokenizers.Tokenizer:
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made


def read(text: str = TEXT) -> Sentence:
    return Sentence.read(text, word_piece())


def words(sentence: Sentence, numbers: Sequence[int]) -> list[str]:
    return [sentence.words[number].text for number in numbers]


def test_words_are_those_of_berts_basic_tokenizer() -> None:
    sentence = read()
    assert [word.text for word in sentence.words] == BasicTokenizer().tokenize(TEXT)
    pieces = {word.text: [PIECES[sentence.ids[n]] for n in word.pieces] for word in sentence.words}
    assert pieces["unhappy"] == ["un", "##happy"]
    assert pieces["mats"] == ["[UNK]"]


def test_words_of_letters_that_are_no_stop_words_may_be_replaced() -> None:
    sentence = read()
    assert words(sentence, replaceable(sentence)) == ["unhappy", "cat", "sat", "cafe", "mats"]
    assert words(read("a1 naïve x-y Dog"), replaceable(read("a1 naïve x-y Dog"))) == [
        "naive", "x", "dog",
    ]  # fmt: skip


def byte_level() -> tokenizers.Tokenizer:
    pieces = {"a": 0, "b": 1, "Ġ": 2, "ab": 3, "Ġab": 4}
    made = tokenizers.Tokenizer(models.BPE(pieces, [("a", "b"), ("Ġ", "ab")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def unigram(metaspace: bool) -> tokenizers.Tokenizer:
    """Marks words, but does not split text there; without `metaspace`, as Llama's."""
    pieces = ["<unk>", "\u2581", "\u2581ab", "a", "b"]
    made = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0))
    if metaspace:
        made.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    else:
        marks = normalizers.Replace(" ", "\u2581")
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), marks])
    return made


@pytest.mark.parametrize("made", [byte_level(), unigram(True), unigram(False)])
def test_words_stand_without_their_space_and_the_first_has_the_tokens_of_others(made) -> None:
    sentence = Sentence.read("ab  ba ab", made)
    first, *_, last = words_of_letters = [word for word in sentence.words if word.text]
    assert [word.text for word in words_of_letters] == ["ab", "ba", "ab"]
    ids = [[sentence.ids[piece] for piece in word.pieces] for word in (first, last)]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 1
    assert sentence.replaced({0: "xyz", len(sentence.words) - 1: "c"}) == "xyz  ba c"


def test_every_word_is_replaced_with_probability_1_and_none_with_0() -> None:
    sentence = read("cat sat on mat")
    candidates = {0: ["dog"], 3: ["rug"]}
    assert Replacement(5, 1.0).copies_of(sentence, candidates) == ["dog sat on rug"]
    assert Replacement(5, 0.0).copies_of(sentence, candidates) == []
    assert Replacement(5, 1.0).copies_of(sentence, {}) == []


def test_copies_differ_and_follow_from_seed_and_place() -> None:
    sentence = read("cat sat on mat")
    candidates = {0: ["cat", "dog", "cow"], 1: ["stood", "lay"], 3: ["rug"]}
    made = Replacement(copies=20, seed=3).copies_of(sentence, candidates, 7, 0)
    assert len(set(made)) == len(made) > 5
    assert sentence.text not in made
    assert made == Replacement(copies=20, seed=3).copies_of(sentence, candidates, 7, 0)
    assert made != Replacement(copies=20, seed=4).copies_of(sentence, candidates, 7, 0)
    assert made != Replacement(copies=20, seed=3).copies_of(sentence, candidates, 7, 1)
    fewer = Replacement(copies=4, seed=3).copies_of(sentence, candidates, 7, 0)
    assert made[: len(fewer)] == fewer


def test_words_are_replaced_as_often_as_told_and_by_each_candidate_alike() -> None:
    count, kept, by = 3000, 0, {"a": 0, "b": 0}
    for number in range(count):
        made = Replacement(copies=1, probability=0.4).copies_of(
            read("cat"), {0: ["a", "b"]}, number
        )
        kept += not made
        for one in made:
            by[one] += 1
    assert kept / count == pytest.approx(0.6, abs=0.04)
    assert by["a"] / count == pytest.approx(0.2, abs=0.04)


VECTORS = "king 1 0\nqueen 0.9 0.1\nman 0.5 0.5\n<unk> 9 9\napple 0 -2\n"


def test_the_nearest_words_are_those_of_the_largest_cosine(tmp_path) -> None:
    file = tmp_path / "glove.txt"
    file.write_text(VECTORS)
    vectors = WordVectors.read(file)
    assert vectors.nearest("king", 2) == ["queen", "man"]
    assert vectors.nearest("king", 9) == ["queen", "man", "apple"]
    assert vectors.nearest_to(np.float32([1, 0]), 9) == ["king", "queen", "man", "apple"]
    assert vectors.nearest("nobody", 2) == []
    assert vectors.nearest("King", 2) == []  # as in the code: it is not in the file
    file.write_text("Rome 1 0\nparis 1 1\n")
    assert WordVectors.read(file).nearest("Rome", 5) == ["Paris"]


@pytest.mark.parametrize("header", ["", "4 2\n"])
def test_words_of_vectors_may_hold_spaces(tmp_path, header) -> None:
    (tmp_path / "some.vec").write_text(f"{header}king 1 0 \n. . . 0.9 0.1 \nat 10 0 1 \n7 1 1 \n")
    vectors = WordVectors.read(tmp_path / "some.vec")
    assert vectors.words == ["king", ". . .", "at 10", "7"]
    assert vectors.nearest("king", 1) == [". . ."]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 1 2\nb 1\n", r"glove\.txt:2: must be a word and its 2 numbers"),
        ("a\n", r"glove\.txt:1: must be a word and its numbers"),
        ("5 2\na 1\n", r"glove\.txt:2: must be a word and its 2 numbers"),
        ("5 2\n", r"glove\.txt: holds no word vectors"),
        ("a 1 x\n", r"glove\.txt:1: must be"),
        ("a 1 nan\n", r"glove\.txt:1: must be"),
        ("", r"glove\.txt: holds no word vectors"),
    ],
)
def test_a_bad_file_of_vectors_is_named(tmp_path, text, message) -> None:
    (tmp_path / "glove.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        WordVectors.read(tmp_path / "glove.txt")


def test_with_stop_words_of_its_language_words_of_any_letters_may_be_replaced() -> None:
    texts = {
        "straße": True,
        "из": False,
        "हिन्दी": True,
        "a1": False,
    }
    for text, is_replaced in texts.items():
        assert is_word(text, english=False) == (is_replaced or text == "из")
        assert not is_word(text, english=True)
    sentence = Sentence("", (), tuple(Word(text, 0, range(1)) for text in texts))
    assert replaceable(sentence, {"из"}) == [0, 2]


def test_english_is_known_by_its_stop_words() -> None:
    assert is_english(["The film is a waste of time, and I left it."])
    assert not is_english(["Der Film ist so schlecht, daß wir vor dem Ende gegangen sind."])
    assert not is_english(["Этот фильм плохой"])
