"""The augmentation of Tang et al.: what happens to words, and the tagger of parts of speech."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from data_pipeline import DataError
from data_pipeline.augmentation.perturbation import Lexicon, Perturbation, Tagger, tagged, untagged
from data_pipeline.task_files.conll import read_conll
from data_pipeline.task_files.tables import read_table
from tests.conftest import tandem
from tests.real_data import real_data
from trainer.augmentation.augmenting import Perturbing, mask_token

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "the", "dog", "ran", "to", "the", "river"]
TAGS = ["D", "N", "V", "P", "D", "N", "C", "D", "N", "V", "P", "D", "N"]
TEXT = " ".join(WORDS)
LEXICON = Lexicon(tagged([TEXT], [TAGS]))


def copies(**settings: float) -> list[str]:
    how = Perturbation(**{"copies": 400, "mask": 0, "replace": 0, "ngram": 0, **settings})
    return [text for (text,) in how.copies_of([TEXT], [TAGS], LEXICON, 0)]


def test_words_are_masked_as_often_as_told() -> None:
    how = Perturbation(copies=1, mask=0.1, replace=0, ngram=0)
    words = masked = 0
    for example in range(2000):
        for (text,) in how.copies_of([TEXT], [TAGS], LEXICON, example) or [(TEXT,)]:
            pairs = list(zip(text.split(), WORDS, strict=True))
            assert all(word in ("[MASK]", own) for word, own in pairs)
            words, masked = words + len(pairs), masked + sum(one != own for one, own in pairs)
    assert abs(masked / words - 0.1) < 0.006  # three standard deviations


def test_a_word_is_replaced_by_one_of_its_part_of_speech() -> None:
    tag_of = dict(zip(WORDS, TAGS, strict=True))
    made = [text.split() for text in copies(replace=0.5)]
    assert {tuple(tag_of[word] for word in text) for text in made} == {tuple(TAGS)}
    nouns = Counter(text[1] for text in made)
    assert set(nouns) == {"cat", "mat", "dog", "river"}


def test_words_are_drawn_by_their_frequency() -> None:
    lexicon = Lexicon([("rare", "N"), *[("often", "N")] * 3])
    assert [lexicon.word("N", place / 8) for place in range(8)] == 6 * ["often"] + 2 * ["rare"]


def test_an_ngram_stands_in_the_text() -> None:
    made = copies(ngram=1.0)
    assert {len(text.split()) for text in made} == {1, 2, 3, 4, 5}
    assert all(f" {text} " in f" {TEXT} " for text in made)
    assert len(made) == len(set(made)) <= 55


def test_of_two_texts_either_and_both_are_varied_in_turn() -> None:
    how = Perturbation(copies=60, ngram=1.0)
    pair = how.copies_of([TEXT, TEXT], [TAGS, TAGS], LEXICON, 3)
    kinds = Counter((first == TEXT, second == TEXT) for first, second in pair)
    assert set(kinds) == {(True, False), (False, True), (False, False)}
    assert pair == how.copies_of([TEXT, TEXT], [TAGS, TAGS], LEXICON, 3)
    assert pair != how.copies_of([TEXT, TEXT], [TAGS, TAGS], LEXICON, 4)


def test_without_tags_no_word_needs_one() -> None:
    how = Perturbation(replace=0.0)
    assert how.copies_of(["one word"], untagged(["one word"]), Lexicon([]), 0)


def conll(path: Path) -> Path:
    lines = [f"{word} {tag}" for word, tag in zip(WORDS, TAGS, strict=True)]
    path.write_text("\n".join([*lines, ""] * 20))
    return path


def test_a_tagger_learns_a_file(tmp_path: Path) -> None:
    tagger = Tagger.learn(conll(tmp_path / "pos"))
    assert tagger.tags([TEXT, "", "the dog"]) == [TAGS, [], ["D", "N"]]
    (tmp_path / "one").write_text("a X\nb X\n")
    with pytest.raises(DataError, match="all words have the tag X; choose another --tag-column"):
        Tagger.learn(tmp_path / "one")


@pytest.mark.slow
def test_parts_of_speech_of_real_text_are_mostly_right() -> None:
    folder = real_data("ner")
    tagger = Tagger.learn(folder / "eng.train.xz", 2, "latin-1")
    held_out = list(read_conll(str(folder / "eng.testa.xz"), tag=2, encoding="latin-1"))
    found = tagger.tags([" ".join(one.words) for one in held_out])
    right = sum(a == b for one, own in zip(held_out, found, strict=True)
                for a, b in zip(one.tags, own, strict=True))  # fmt: skip
    assert right / sum(len(one.words) for one in held_out) > 0.92


def test_the_command_writes_a_table_and_resumes_alike(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("text\tlabel\n" + "".join(
        f"{' '.join(WORDS[n:])}\t{n % 2}\n" for n in range(5)
    ))  # fmt: skip
    words = [f"data.train={tmp_path / 'train.tsv'}", f"data.validation={tmp_path / 'train.tsv'}"]
    outs = [tmp_path / "a.tsv", tmp_path / "b.tsv"]
    options = ["--tagged", conll(tmp_path / "pos"), "--copies", 10]
    for out in outs:
        done = tandem("data", "perturb", "single_sentence", *words, *options, "--out", out)
        assert done.returncode == 0, done.stderr
        assert "made of 5" in done.stdout
    assert outs[0].read_bytes() == outs[1].read_bytes()
    columns = {"text": "text", "label": "label"}
    made = [row for _, row in read_table(str(outs[0]), columns)]
    given = [row for _, row in read_table(str(tmp_path / "train.tsv"), columns)]
    assert [row for row in made if row in given] == given
    assert len(made) > 30
    assert json.loads((tmp_path / "a.tsv.json").read_text())["tagged"]["column"] == -1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--tagged: must name a file of parts of speech, or set --replace 0"),
        (["--replace", 0, "--tag-column", 2], "are for --tagged; remove them"),
        *(
            (["--replace", 0, "--mask-token", token], "--mask-token: must be one word")
            for token in ("\t", "a b", "[MASK]\n")
        ),
        (["--mask", 0.6, "--replace", 0.6], "must not be more than 1"),
        *(
            (["--replace", 0, f"--{one}", "nan"], "nan is not a number")
            for one in ("mask", "ngram")
        ),
        *(
            (
                ["--tagged", "x", "--encoding", one],
                f"{one!r}: must be a text encoding that extends ASCII",
            )
            for one in ("foo", "", "rot13", "hex", "undefined", "utf-16", "utf-16-le", "cp037")
        ),
        (["--tagged", "none"], "none: cannot be read"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, options: list, message: str) -> None:
    (tmp_path / "train.tsv").write_text("text\tlabel\na b\t0\nc d\t1\n")
    words = [f"data.{one}={tmp_path / 'train.tsv'}" for one in ("train", "validation")]
    out = ["--out", tmp_path / "o.tsv"]
    done = tandem("data", "perturb", "single_sentence", *words, *options, *out)
    assert done.returncode == (1 if "none" in options else 2)
    assert message in done.stderr.splitlines()[-1]


def test_words_without_spaces_are_told_and_the_mask_is_the_tokenizers(
    tmp_path: Path, caplog
) -> None:
    how = Perturbing(Perturbation(replace=0.0))
    row = {"text": "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22"}
    how.over([row], ["text"], torch.device("cpu"))
    assert "100% of the letters have no spaces between words (Thai)" in caplog.text
    caplog.clear()
    how.over([{"text": "words with spaces"}], ["text"], torch.device("cpu"))
    assert not caplog.text
    (tmp_path / "vocab.txt").write_text("<pad>\n<unk>\n<s>\n</s>\n<mask>\na\n")
    names = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
    config = {f"{name}_token": token for name, token in names.items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert mask_token(str(tmp_path)) == "<mask>"
    assert mask_token(None) is None
