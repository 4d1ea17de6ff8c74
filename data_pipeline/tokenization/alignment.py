"""Two tokenizers: whether they make the same tokens, their aligned spans and shared tokens.

A vocabulary does not say how a text is normalised and split before it is looked up. Two versions of
a tokenizer may also write the same rules in other words (a new release of ``tokenizers``, a
``vocab.txt`` instead of a ``tokenizer.json``), so what they do is compared, not what is written.

Aligned spans are the smallest stretches of a text at whose ends two tokenizers have boundaries.

Characters that one of the two leaves out (spaces, accents, control characters) do not count. A
token of such characters alone is a span by itself, without a counterpart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models

from data_pipeline.shards.blocks import OtherTokens, offsets, token_dtype
from data_pipeline.tokenization.tokenizer import WORD_MARKS, load, word_starts

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
    letters = map(chr, (*range(0x21, 0x17F), *range(0x391, 0x44F)))
    texts = [*_TEXTS, *letters, *_words(ours)]
    pairs = (reading.encode_batch(texts, add_special_tokens=False) for reading in (ours, theirs))
    for text, a, b in zip(texts, *pairs, strict=True):
        if a.ids != b.ids:
            return text
    return None


def _words(tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """Tokens of the vocabulary in even distances as text, in small and in large letters."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    for token, _ in vocabulary[:: len(vocabulary) // SAMPLE + 1]:
        word = token.translate(_MARKS)
        yield word
        yield word.title()


NONE = -1
_Token = tuple[bool, bytes]  # whether it begins a word, and its text without the space before it
_OURS, _THEIRS, _BOTH = range(3)  # the order of spans that begin at the same place


class Aligner:
    """Reads texts by other tokenizers, and aligns their tokens with those of the first."""

    def __init__(self, first: tokenizers.Tokenizer, others: Sequence[tokenizers.Tokenizer]) -> None:
        self._first, self._others = first, others

    def __call__(self, texts: Sequence[str]) -> list[tuple[OtherTokens, ...]]:
        """The texts by each of the others."""
        if not self._others or not texts:
            return [()] * len(texts)
        ours = self._first.encode_batch(texts, add_special_tokens=False)
        by_other = [self._aligned(ours, other, texts) for other in self._others]
        return [*zip(*by_other, strict=True)]

    def _aligned(
        self, ours: Sequence[tokenizers.Encoding], other: tokenizers.Tokenizer, texts: Sequence[str]
    ) -> list[OtherTokens]:
        theirs = other.encode_batch(texts, add_special_tokens=False)
        dtype = token_dtype(max(other.get_vocab(with_added_tokens=True).values()) + 1)
        return [
            OtherTokens.of(
                np.array(their.ids, dtype),
                *aligned_spans(_offsets(our), _offsets(their), len(text)),
            )
            for our, their, text in zip(ours, theirs, texts, strict=True)
        ]


def aligned_spans(
    ours: NDArray[np.int64], theirs: NDArray[np.int64], characters: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The number of tokens of each of two tokenizers in each aligned span of a text.

    ours, theirs: [tokens, 2] the first character of each token, and the one behind its last.
    """
    counts = _covered(ours, characters) & _covered(theirs, characters)
    before = offsets(counts)  # counting characters before each
    both = [_Tokens.of(before[places]) for places in (ours, theirs)]
    first, second = (tokens.cuts(int(before[-1])) for tokens in both)
    cuts = np.intersect1d(first, second)
    keys = [tokens.spans(cuts, kind) for tokens, kind in zip(both, (_OURS, _THEIRS), strict=True)]
    last = max((int(key[-1]) for key in keys if len(key)), default=-1)
    sizes = [np.bincount(key, minlength=last + 1) for key in keys]
    is_span = (sizes[0] + sizes[1]) > 0
    return sizes[0][is_span], sizes[1][is_span]


@dataclass(frozen=True)
class _Tokens:
    """The places of tokens among the characters that count, in order."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, places: NDArray[np.int64]) -> _Tokens:
        """Where a normalizer turns characters around, tokens reach back."""
        starts = np.maximum.accumulate(places[:, 0])
        return cls(starts, np.maximum(starts, places[:, 1]))

    def cuts(self, last: int) -> NDArray[np.int64]:
        """The places that no token spans."""
        reached = np.maximum.accumulate(np.concatenate([[0], self.ends]))[:-1]
        return np.append(self.starts[reached <= self.starts], last)

    def spans(self, cuts: NDArray[np.int64], kind: int) -> NDArray[np.int64]:
        """The number of each token's span, ascending; three for each of the common `cuts`."""
        number = np.searchsorted(cuts, self.starts, side="right") - 1
        is_alone = (self.starts == self.ends) & (cuts[number] == self.starts)
        return np.maximum.accumulate(3 * number + np.where(is_alone, kind, _BOTH))


def _covered(places: NDArray[np.int64], characters: int) -> NDArray[np.bool_]:
    """Which characters of a text are in a token."""
    changes = np.zeros(characters + 1, np.int64)
    np.add.at(changes, places[:, 0], 1)
    np.add.at(changes, places[:, 1], -1)
    return np.cumsum(changes)[:-1] > 0


def _offsets(encoding: tokenizers.Encoding) -> NDArray[np.int64]:
    """[tokens, 2]."""
    return np.array(encoding.offsets, np.int64).reshape(-1, 2)


def shared_tokens(ours: Path, theirs: Path) -> NDArray[np.int64]:
    """The id in another tokenizer's vocabulary of each of ours, [V]; -1 where it has none.

    Two tokens are the same that have the same text and both begin a word, or neither does. Each is
    the counterpart of one other at most: of the one that is written alike, else of the first.
    Special tokens have none. Raises DataError where there is no tokenizer.
    """
    (first, vocabulary), (second, _) = load(ours), load(theirs)
    mine, other = dict(_tokens(ours)), dict(_tokens(theirs))
    counterparts = np.full(vocabulary.vocab_size, NONE, np.int64)
    for number in mine:
        counterpart = second.token_to_id(str(first.id_to_token(number)))
        if counterpart is not None and other.get(counterpart) == mine[number]:
            counterparts[number] = counterpart
            del other[counterpart]
    by_token: dict[_Token, int] = {}
    for number, token in other.items():
        by_token.setdefault(token, number)
    for number, token in mine.items():
        if counterparts[number] == NONE:
            counterparts[number] = by_token.pop(token, NONE)
    return counterparts


def _tokens(folder: Path) -> Iterator[tuple[int, _Token]]:
    """The ordinary tokens of a tokenizer by their ids, ascending."""
    tokenizer, vocabulary = load(folder)
    starts, text_of = word_starts(tokenizer, vocabulary), _reader(tokenizer)
    for number in vocabulary.ordinary.tolist():
        yield number, (bool(starts[number]), text_of(str(tokenizer.id_to_token(number))))


def _reader(tokenizer: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """A function that gives the text of a token."""
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        known = _bytes_of_signs()
        return lambda token: bytes(known.get(sign, 0) for sign in token).lstrip(b" ")
    if isinstance(tokenizer.model, models.WordPiece):
        return lambda token: token.removeprefix("##").encode()
    return lambda token: token.lstrip("".join(WORD_MARKS)).encode()


def _bytes_of_signs() -> dict[str, int]:
    """The byte of each sign of byte-level tokens, as GPT-2's code has it.

    Printable bytes are written as themselves, and the others as the signs from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    signs = {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {**{chr(byte): byte for byte in printable}, **signs}
