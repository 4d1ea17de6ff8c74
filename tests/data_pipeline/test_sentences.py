"""Sentence splitting: abbreviations, quotes, headings, wrapped and unpunctuated text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.text.sentences import MAX_CHARACTERS, sentence_ends, word_pattern


def split(text: str) -> list[str]:
    ends = sentence_ends(text)
    return [text[a:b].strip() for a, b in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize(
    "sentences",
    [
        ["It rained.", "We stayed in.", "Why?", "Because!"],
        ["Dr. Smith met Mr. and Mrs. Jones at St. Mary's.", "They talked."],
        ["He lived in the U.S. Army base.", "J. R. R. Tolkien wrote it."],
        ["See Fig. 3 and pp. 12-14, vol. 2.", "No. 5 is missing.", "She said no.", "He left."],
        ['"Come here!"', 'She said, "No."', "(He left.)", "“Really?”", "\u2018Yes.\u2019"],
        ["It cost 3.50 dollars, i.e. too much, e.g. for John.", "Version 2.0.1 came out."],
        ["Wait...", "What?!", "Never…", "Fine."],
        ["Chapter One", "It was a dark night.", "The End"],
        ["a wrapped line\nthat goes on here.", "Next one."],
        ["これは文です。", "次の文です。"],
        ["In 1999 it began.", "2000 was the end."],
        ["I did it with Jim Jr. and Co. in Jan. and Feb. as planned.", "So did I.", "Then we ate."],
    ],
)
def test_sentences(sentences: list[str]) -> None:
    for joint in (" ", "  ", "\n"):
        if sentences[0] == "これは文です。":
            joint = ""
        if sentences[0] == "Chapter One":
            joint = "\n"
        assert split(joint.join(sentences)) == sentences


def test_long_text_is_cut_at_the_best_place() -> None:
    commas = ("some words here and there, " * 100).strip()
    assert all(one.endswith(",") for one in split(commas)[:-1])
    plain = "word " * 1000
    assert all(one.split() == ["word"] * len(one.split()) for one in split(plain))
    solid = "x" * 5000
    assert "".join(split(solid)) == solid
    lower = ("no capitals follow these stops. " * 100).strip()
    assert all(one.endswith(".") for one in split(lower))


@given(st.text(alphabet="aB .!?\n\"'(1。…,é-", max_size=400) | st.text(max_size=2000))
@settings(max_examples=50)
def test_whatever_the_text(text: str) -> None:
    ends = sentence_ends(text)
    assert ends == sorted(set(ends))
    assert (ends[-1] if ends else 0) == len(text)
    sizes = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    assert max(sizes, default=0) <= MAX_CHARACTERS or text.isspace()
    if not text.isspace():
        assert all(one for one in split(text))


REPEATED = [
    ".",
    '."',
    '...."""',
    ".\u201d",
    "\n",
    "a\n ",
    "Mr. ",
    "X\nmr.\t",
    "A.",
    ". (",
    "。",
    " \u2026",
]


@pytest.mark.parametrize("part", REPEATED)
def test_the_search_is_linear(part: str) -> None:
    """A quadratic search would take many minutes over these texts."""
    text = "a" + part * (300_000 // len(part)) + "b"
    assert sentence_ends(text)[-1] == len(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's U.S. law -- so, x-y", ["It's", "U.S", ".", "law", "-", "-", "so", ",", "x-y"]),
        (
            "\u0939\u093f\u0928\u094d\u0926\u0940 \u092e\u0947\u0902\u0964",
            ["\u0939\u093f\u0928\u094d\u0926\u0940", "\u092e\u0947\u0902", "\u0964"],
        ),  # Hindi with vowel signs
        ("\u0645\u064f\u062d, e\u0301t", ["\u0645\u064f\u062d", ",", "e\u0301t"]),
        ("\u0645\u06cc\u200c\u062e", ["\u0645\u06cc\u200c\u062e"]),  # Persian, a joiner inside
        ("\u202b\u05d0\u05d1\u202c \u2764\ufe0f \u200f", ["\u05d0\u05d1", "\u2764\ufe0f"]),
    ],
)
def test_words_hold_their_marks_in_any_script(text: str, words: list[str]) -> None:
    """Words were cut at each vowel sign, and invisible characters were words."""
    assert word_pattern("-.'", signs=True).findall(text) == words
