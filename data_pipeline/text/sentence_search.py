"""The sentences of many documents at once, as `data_pipeline.text.sentences` finds them.

What ends a sentence for certain, and what does not, is told by the bytes around it, in compiled
loops over all documents together. That is nine cases in ten; of the others the rules themselves
are asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.text.compiled import compiled
from data_pipeline.text.joined_text import LINE_FEED, JoinedText
from data_pipeline.text.sentences import (
    ABBREVIATIONS,
    BEFORE_NUMBER,
    BREAK,
    LONGEST,
    MAX_CHARACTERS,
    cuts,
    end_at,
    first_solid,
)

NO, YES, ASK = range(3)
_DOT = ord(".")


def _among(which: Iterable[int]) -> NDArray[np.bool_]:
    """[256] whether a byte is among these."""
    return np.isin(np.arange(256), [*which])


def _answers(yes: bytes, ask: bytes) -> NDArray[np.uint8]:
    """[256] an answer for each byte; `ASK` for those of characters beyond ASCII too."""
    table = np.full(256, NO, np.uint8)
    table[[*yes]] = YES
    table[[*ask, *range(128, 256)]] = ASK
    return table


_CAPITALS_AND_DIGITS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_LETTERS = b"abcdefghijklmnopqrstuvwxyz"
_SPACE_AFTER = _answers(b" ", b"\t.!?\"')]")  # yes: if what comes then can begin a sentence
_CAN_BEGIN = _answers(_CAPITALS_AND_DIGITS, b" \t\"'([-")
_MAY_END = _among(b"\n.!?\xe2\xe3\xef")  # the last are the first bytes of rare stops
_IN_WORD = _among(_CAPITALS_AND_DIGITS + _LETTERS)
_IS_LOWER = _among(_LETTERS)
_IS_INITIAL = _among(b"ABCDEFGHJKLMNOPQRSTUVWXYZ")  # "I" is a word
_ENDS_OTHER = _among(b"\"')]%")  # what ends with these is no abbreviation
_CLOSES, _OPENS = _among(b"\"')]"), _among(b"\"'([-")
_UNFINISHED = ~_among(b".!?:")
_SOLID = _among(range(33, 127))
_SPACES = _among(b" \n")


def _keys(words: Iterable[str]) -> NDArray[np.uint64]:
    return np.array([int.from_bytes(word.encode(), "little") for word in words], np.uint64)


class _Known(NamedTuple):
    """Words before a full stop that does not, or need not, end a sentence."""

    abbreviations: NDArray[np.uint64]
    before_number: NDArray[np.uint64]
    longest: int


_KNOWN = _Known(_keys(ABBREVIATIONS), _keys(BEFORE_NUMBER), LONGEST)
# Characters of three bytes; see `BREAK`.
_RARE_STOPS = _keys("\u2026\u3002\uff01\uff1f")
_CLOSES_TOO, _OPENS_TOO = _keys("\u201d\u2019"), _keys("\u201c\u2018\u2014\u2013")
_LOWER_CASE = np.uint64(0x2020202020202020)


def find_sentences(text: JoinedText) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The bytes before each sentence of the documents, and all, [sentences + 1]; and the sentences
    before each document, and all, [documents + 1].

    No document may begin or end with white space.
    """
    ends, asked = _survey(text.data, text.windows, text.documents, _KNOWN)
    found = _sorted(ends, text.documents)
    more = np.fromiter(_ask(text, asked, found), np.int64)
    found = _shortened(text, _sorted(found, text.byte_places(more)))
    return found, np.searchsorted(found, text.documents)


@compiled
def _survey(
    data: NDArray[np.uint8],
    windows: NDArray[np.uint64],
    documents: NDArray[np.int64],
    known: _Known,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Before which bytes a sentence ends for certain, and the bytes at which it must be asked."""
    ends, asked = np.empty(len(data), np.int64), np.empty(len(data), np.int64)
    found = unclear = document = 0
    for at in range(documents[-1]):
        if not _MAY_END[data[at]]:
            continue
        while documents[document + 1] <= at:
            document += 1
        answer, end = _at(data, windows, at, documents[document], documents[document + 1], known)
        if answer == YES:
            ends[found] = end
            found += 1
        elif answer == ASK:
            asked[unclear] = at
            unclear += 1
    return ends[:found].copy(), asked[:unclear].copy()


@compiled
def _at(
    data: NDArray[np.uint8],
    windows: NDArray[np.uint64],
    at: int,
    first: int,
    last: int,
    known: _Known,
) -> tuple[int, int]:
    """Whether a sentence ends at byte `at` of a document from `first` to `last`, and where."""
    if data[at] >= 128:
        return (ASK if _is_among(_three_bytes(data, at), _RARE_STOPS) else NO), at
    if data[at] == LINE_FEED:
        return _at_line_feed(data, at), at
    closed = _width(data, at + 1, _CLOSES, _CLOSES_TOO)
    end = at + 1 + closed
    begin = end + 1 + _width(data, end + 1, _OPENS, _OPENS_TOO)
    if at + 1 == last or begin >= last:
        return NO, end
    answer = _SPACE_AFTER[data[end]]
    if answer == YES:
        answer = _CAN_BEGIN[data[begin]]
    if answer == YES and not closed:
        answer = _behind_word(data, windows, at, first, known)
    return answer, end


@compiled
def _at_line_feed(data: NDArray[np.uint8], at: int) -> int:
    before, after = data[at - 1], data[at + 1]
    behind_text = _SOLID[before] or (at >= 3 and _is_among(_three_bytes(data, at - 3), _CLOSES_TOO))
    is_known = after < 128 or _is_among(_three_bytes(data, at + 1), _OPENS_TOO)
    if not (behind_text and is_known):
        return ASK
    return NO if _IS_LOWER[after] and _UNFINISHED[before] else YES


@compiled
def _behind_word(
    data: NDArray[np.uint8], windows: NDArray[np.uint64], at: int, first: int, known: _Known
) -> int:
    """Whether the word before a stop lets it end a sentence, where what follows can begin one."""
    size = 0
    while size <= known.longest and first < at - size and _IN_WORD[data[at - size - 1]]:
        size += 1
    is_whole = at - size == first or _SPACES[data[at - size - 1]]
    if size == 0:
        return YES if at > first and _ENDS_OTHER[data[at - 1]] else ASK
    if data[at] != _DOT or size > known.longest:  # no abbreviations
        return YES
    if size == 1 and is_whole and _IS_INITIAL[data[at - 1]]:
        return NO
    if not is_whole or at < 8:
        return ASK
    # The word in lower case as a number, its first letter lowest.
    key = (windows[at - 8] | _LOWER_CASE) >> np.uint64(8 * (8 - size))
    if _is_among(key, known.before_number):
        return ASK
    return NO if _is_among(key, known.abbreviations) else YES


@compiled
def _width(
    data: NDArray[np.uint8], at: int, which: NDArray[np.bool_], longer: NDArray[np.uint64]
) -> int:
    """How many bytes a character has that is one of `which`, or of `longer`; 0 if it is none."""
    if _is_among(_three_bytes(data, at), longer):
        return 3
    return 1 if which[data[at]] else 0


@compiled
def _three_bytes(data: NDArray[np.uint8], at: int) -> np.uint64:
    """As a number, the first lowest."""
    return np.uint64(data[at] | np.uint64(data[at + 1]) << 8 | np.uint64(data[at + 2]) << 16)


@compiled
def _is_among(key: np.uint64, keys: NDArray[np.uint64]) -> bool:
    for one in keys:  # noqa: SIM110
        if one == key:
            return True
    return False


def _ask(text: JoinedText, at: NDArray[np.int64], sure: NDArray[np.int64]) -> Iterator[int]:
    """The character at which each sentence ends that may end at these bytes; `sure` are the bytes
    at which others begin."""
    starts = text.character_places(sure[np.searchsorted(sure, at, "right") - 1]).tolist()
    documents = np.searchsorted(text.documents, at, "right")
    stops = text.character_places(text.documents[documents]).tolist()
    places = text.character_places(at).tolist()
    done = last = solid = 0
    begin = -1
    for place, start, stop in zip(places, starts, stops, strict=True):
        match = BREAK.match(text.characters, place, stop) if place >= done else None
        if match:
            done = match.end()
            if begin != max(start, last):
                begin = max(start, last)
                solid = first_solid(text.characters, begin)
            end = end_at(text.characters, begin, solid, match)
            if end is not None:
                last = end
                yield end


def _shortened(text: JoinedText, found: NDArray[np.int64]) -> NDArray[np.int64]:
    """With what is too long cut."""
    places = text.character_places(found)
    long = np.flatnonzero(np.diff(places) > MAX_CHARACTERS).tolist()
    more = [at for one in long for at in cuts(text.characters, places[one], places[one + 1])]
    return _sorted(found, text.byte_places(np.array(more, np.int64)))


def _sorted(*places: NDArray[np.int64]) -> NDArray[np.int64]:
    """All of them once. (numpy's `unique` is ten times as slow.)"""
    joined = np.sort(np.concatenate(places))
    return joined[np.diff(joined, prepend=-1) > 0]
