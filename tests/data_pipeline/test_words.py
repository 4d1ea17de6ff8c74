"""The table of words, and unigram segmentation of many words at once."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import models, normalizers, pre_tokenizers

from data_pipeline.text.joined_text import PADDING, JoinedText, offsets
from data_pipeline.tokenization.unigram import ordinary_words_of
from data_pipeline.tokenization.word_table import WordTable


def joined(words: list[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Words in one padded array, and where each starts and ends."""
    found = offsets([len(word) for word in words])
    return np.frombuffer(b"".join(words) + bytes(PADDING), np.uint8), found[:-1], found[1:]


def in_windows(
    words: list[bytes],
) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
    """The same, with the eight bytes from each position on as one number."""
    data, starts, ends = joined(words)
    return JoinedText("", b"", data, starts).windows, starts, ends


WORDS = st.lists(
    st.binary(min_size=1, max_size=40).filter(lambda word: 0 not in word)
    | st.sampled_from([b"a" * size for size in range(1, 40)]),
    max_size=60,
)


@given(st.lists(WORDS, max_size=4), st.integers(0, 80))
@settings(max_examples=200)
def test_words_have_the_same_number_exactly_when_they_are_equal(
    calls: list[list[bytes]], kept: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_pipeline.tokenization.word_table.FIRST_SLOTS", 4)  # grows
        table = WordTable()
    seen: list[bytes] = []
    for words in calls:
        numbers, new = table.numbers(*in_windows(words))
        seen += [words[place] for place in new.tolist()]
        assert [seen[number] for number in numbers.tolist()] == words
    assert len({*seen}) == len(seen) == len(table)
    table.truncate(kept)
    assert len(table) == min(kept, len(seen))
    numbers, new = table.numbers(*in_windows(seen[::-1]))
    assert sorted(numbers.tolist()) == [*range(len(seen))]
    assert [seen[number] for number in numbers[::-1][:kept].tolist()] == seen[:kept]
    assert len(new) == max(0, len(seen) - kept)


def unigram(pieces: list[tuple[str, float]]) -> tokenizers.Tokenizer:
    """A tokenizer of these pieces, which contain SentencePiece's mark."""
    tokenizer = tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), *pieces], 0, False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return tokenizer


LETTERS = ["a", "b", "\u00e9", "\u2014"]
PIECES = st.dictionaries(
    st.builds(
        lambda mark, text: mark + "".join(text),
        st.sampled_from(["", "\u2581"]),
        st.lists(st.sampled_from(LETTERS), min_size=1, max_size=5),
    ),
    st.sampled_from([-1.0, -2.0, -3.0, -0.1, -0.7]),  # many sums are equal
    max_size=30,
)


@given(PIECES, st.lists(st.text(LETTERS, min_size=1, max_size=40), min_size=1, max_size=20))
@settings(max_examples=200)
def test_words_are_cut_as_tokenizers_cuts_them(pieces: dict[str, float], words: list[str]) -> None:
    tokenizer = unigram([*{"\u2581": -4.0, "a": -5.0, "b": -5.0, **pieces}.items()])
    these, ids, sizes = ordinary_words_of(tokenizer)(
        *joined([f" {word}".encode() for word in words])
    )
    vocabulary = tokenizer.get_vocab()
    possible = [vocabulary.keys() >= {*word} for word in words]
    assert these.tolist() == possible
    found = np.split(ids, np.cumsum(sizes))[:-1]
    taken = [word for word, is_taken in zip(words, possible, strict=True) if is_taken]
    assert [part.tolist() for part in found] == [tokenizer.encode(word).ids for word in taken]


def test_a_vocabulary_without_the_mark_leaves_all_words_to_the_library() -> None:
    tokenizer = unigram([("a", -1.0), ("\u2581a", -1.5)])
    these, ids, _ = ordinary_words_of(tokenizer)(*joined([b" a", b" aa", b" "]))
    assert not these.any()
    assert not len(ids)
