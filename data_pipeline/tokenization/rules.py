"""Whether two tokenizers of one vocabulary make the same tokens of every text.

A vocabulary does not say how a text is normalised and split before it is looked up. Two versions of
a tokenizer may also write the same rules in other words (a new release of ``tokenizers``, a
``vocab.txt`` instead of a ``tokenizer.json``), so what they do is compared, not what is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import tokenizers

from data_pipeline.tokenization.tokenizer import load

SAMPLE = 4096  # tokens of the vocabulary that are read as text
_MARKS = str.maketrans({"\u0120": " ", "\u2581": " ", "#": None})  # of a word's begin or inside
_TEXTS = (
    "The quick brown fox, 1,234.50 of them! (Isn't it?) a-b_c/d @e #f $5 100%",
    "the THE The tHE iPhone NASA McDonald don't we'll I'M ``so''",
    "caf\u00e9 cafe\u0301 na\u00efve \u00c5ngstr\u00f6m \u0130stanbul Stra\u00dfe \u0439",
    *(" leading", "trailing ", "two  spaces   three", "tab\there", "line\nbreak", "a\r\nb\n"),
    "\ufb01ne \u00bd \u2460 \uff26\uff55\uff4c\uff4c \u2122 x\u00b2 \u2026 \u201cquoted\u201d",
    "it\u2019s \u2014",
    "\u4e2d\u6587\u5b57 \u65e5\u672c\u8a9e\u3092 \u30ab\u30bf \ud55c\uad6d\uc5b4",
    "\u0e44\u0e17\u0e22 \u0939\u093f\u0928\u094d\u0926\u0940",
    "\u0639\u0631\u0628\u0650\u064a \u05e2\u05d1\u05e8\u05d9\u05ea",
    "a\u00a0b a\u200bb a\u00adb a\u0000b a\ufeffb a\u3000b a\ufffdb a\u0007b",
    "\U0001f600 \U0001f468\u200d\U0001f469 \u2764\ufe0f",
    *("a" * 120, "7" * 7, "-" * 9),
)


def differing_text(first: Path, second: Path) -> str | None:
    """A text of which the tokenizers in two folders make other tokens; None if none is known.

    The texts have capitals, accents, spaces, signs and scripts that rules differ about, each letter
    alone, and words of the vocabulary, which it must share. Raises DataError as `load`.
    """
    ours, theirs = load(first)[0], load(second)[0]
    if ours.to_str() == theirs.to_str():
        return None
    texts = [*_TEXTS, *_letters(), *_words(ours)]
    pairs = (reading.encode_batch(texts, add_special_tokens=False) for reading in (ours, theirs))
    for text, a, b in zip(texts, *pairs, strict=True):
        if a.ids != b.ids:
            return text
    return None


def _letters() -> Iterator[str]:
    for number in (*range(0x21, 0x17F), *range(0x391, 0x44F)):
        yield chr(number)


def _words(tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """Tokens of the vocabulary in even distances as text, in small and in large letters."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    for token, _ in vocabulary[:: len(vocabulary) // SAMPLE + 1]:
        word = token.translate(_MARKS)
        yield word
        yield word.title()
