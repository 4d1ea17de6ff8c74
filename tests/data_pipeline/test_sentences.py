"""Sentence splitting: abbreviations, quotes, headings, wrapped and unpunctuated text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.text.joined_text import JoinedText
from data_pipeline.text.sentence_search import find_sentences
from data_pipeline.text.sentences import MAX_CHARACTERS, sentence_ends


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
    joined = JoinedText.of([text])
    found, _ = find_sentences(joined)
    expected = joined.byte_offsets(np.array([0, *sentence_ends(text)]))
    assert found.tolist() == expected.tolist()


PARTS = st.sampled_from(
    [
        *" \n\t.!?aBé1\"'(-)…。」“”\u2018\u2019—\u2028\xa0",
        *[" The", " it", "Mr", " no", " No", " Fig", "3.5", " U.S", "I", " Messrs", " sentence"],
        *[" A sentence of some words. ", "...", "?!", ". ", '." ', "\n\n", " etc. ", "1990). "],
        *[".” “The", "!\u2019 \u2018", "? —It", ". [", "”\n“", "…\nit", ".\nit", ":\nit"],
        "x" * (MAX_CHARACTERS + 1),
    ]
)
TEXTS = st.lists(PARTS, max_size=40).map("".join) | st.text(max_size=200)


@given(st.lists(TEXTS.map(str.strip).filter(bool), max_size=6))
@settings(max_examples=500)
def test_documents_together_have_the_sentences_of_each(documents: list[str]) -> None:
    text = JoinedText.of(documents)
    found, before = find_sentences(text)
    assert before.tolist() == sorted(before.tolist())
    expected = [0]
    for document in documents:
        start = expected[-1]
        expected += [start + len(document[:end].encode()) for end in sentence_ends(document)]
    assert found.tolist() == expected
    assert found[before].tolist() == text.documents.tolist()
