"""Sentence splitting of many documents at once, with the result of `data_pipeline.text.sentences`.

A compiled loop over all documents looks at the bytes around each possible sentence end. In nine of
ten cases these bytes decide. The rules of `data_pipeline.text.sentences` decide the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from data_pipeline.text.compiled import compiled
from data_pipeline.text.joined_text import JoinedText
from data_pipeline.text.sentences import (
    ABBREVIATIONS,
    BEFORE_NUMBER,
    BREAK,
    LONGEST,
    MAX_CHARACTERS,
    OTHER_STOPS,
    cuts,
    end_at,
    first_non_space,
)

NO, YES, UNSURE = range(3)
_DOT, _LINE_FEED = b".\n"


def _byte_set(which: Iterable[int]) -> NDArray[np.bool_]:
    """[256] True for each of these bytes."""
    return np.isin(np.arange(256), [*which])


def _answer_table(yes: bytes, ask: bytes) -> NDArray[np.uint8]:
    """[256] an answer for each byte; `UNSURE` also for every non-ASCII byte."""
    table = np.full(256, NO, np.uint8)
    table[[*yes]] = YES
    table[[*ask, *range(128, 256)]] = UNSURE
    return table


_CAPITALS_AND_DIGITS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_LETTERS = b"abcdefghijklmnopqrstuvwxyz"
_SPACE_AFTER = _answer_table(b" ", b"\t.!?\"')]")  # YES if a sentence can begin after it
_CAN_BEGIN = _answer_table(_CAPITALS_AND_DIGITS, b" \t\"'([-")
# Written out, since compiled code is kept on disk for as long as this file stays as it is.
_OTHER_STOPS = (
    "\u3002\uff01\uff1f\uff61\u0964\u0965\u061f\u06d4\u0589\u1362\u1367\u104b\u17d4\u17d5"
    "\u0f0d\u0f0e\u1803\u1c7e\uabeb"
)
assert _OTHER_STOPS == OTHER_STOPS
_STOPS_TOO = [stop.encode() for stop in "\u2026" + _OTHER_STOPS]
_MAY_END = _byte_set([*b"\n.!?", *(stop[0] for stop in _STOPS_TOO)])
_IN_WORD = _byte_set(_CAPITALS_AND_DIGITS + _LETTERS)
_IS_LOWER = _byte_set(_LETTERS)
_IS_INITIAL = _byte_set(b"ABCDEFGHJKLMNOPQRSTUVWXYZ")  # "I" is a word
_ENDS_OTHER = _byte_set(b"\"')]%")  # an abbreviation does not end with these
_CLOSES, _OPENS = _byte_set(b"\"')]"), _byte_set(b"\"'([-")
_UNFINISHED = ~_byte_set(b".!?:")
_SOLID = _byte_set(range(33, 127))
_SPACES = _byte_set(b" \n")


def _keys(words: Iterable[str]) -> NDArray[np.uint64]:
    return np.array([int.from_bytes(word.encode(), "little") for word in words], np.uint64)


# Words after which a full stop does not, or need not, end a sentence, and the longest one's bytes.
_Abbreviations = tuple[NDArray[np.uint64], NDArray[np.uint64], int]
# Words that are not ASCII are left to the rules.
_ABBREVIATIONS: _Abbreviations = (
    _keys(filter(str.isascii, ABBREVIATIONS)),
    _keys(filter(str.isascii, BEFORE_NUMBER)),
    LONGEST,
)
# Characters of two and of three bytes; see `BREAK`.
_STOPS_OF_2, _STOPS_OF_3 = (
    np.array([int.from_bytes(stop, "little") for stop in _STOPS_TOO if len(stop) == n], np.uint64)
    for n in (2, 3)
)
_CLOSES_TOO, _OPENS_TOO = _keys("\u201d\u2019"), _keys("\u201c\u2018\u2014\u2013")
_TWO_BYTES = np.uint64(0xFFFF)
_LOWER_CASE = np.uint64(0x2020202020202020)


def find_sentences(text: JoinedText) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Byte offsets of the sentences, and the number of sentences before each document.

    The shapes are [sentences + 1] and [documents + 1]; the last entries are the totals.

    No document may begin or end with white space.
    """
    ends, unsure = _scan(text.data, text.windows, text.documents, _ABBREVIATIONS)
    bounds = _sorted(ends, text.documents)
    more = np.fromiter(_resolve(text, unsure, bounds), np.int64)
    bounds = _cut_overlong(text, _sorted(bounds, text.byte_offsets(more)))
    return bounds, np.searchsorted(bounds, text.documents)


@compiled
def _scan(
    data: NDArray[np.uint8],
    windows: NDArray[np.uint64],
    documents: NDArray[np.int64],
    known: _Abbreviations,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(bytes before which a sentence certainly ends, stops that the rules must decide)."""
    ends, unsure = np.empty(len(data), np.int64), np.empty(len(data), np.int64)
    certain = unclear = document = 0
    for at in range(documents[-1]):
        if not _MAY_END[data[at]]:
            continue
        while documents[document + 1] <= at:
            document += 1
        answer, end = _at(data, windows, at, documents[document], documents[document + 1], known)
        if answer == YES:
            ends[certain] = end
            certain += 1
        elif answer == UNSURE:
            unsure[unclear] = at
            unclear += 1
    return ends[:certain].copy(), unsure[:unclear].copy()


@compiled
def _at(
    data: NDArray[np.uint8],
    windows: NDArray[np.uint64],
    at: int,
    first: int,
    last: int,
    known: _Abbreviations,
) -> tuple[int, int]:
    """Whether a sentence ends at the stop at byte `at`, and the byte at which it would end.

    The document spans the bytes from `first` up to `last`.
    """
    if data[at] >= 128:
        three = _three_bytes(data, at)
        is_stop = _is_among(three, _STOPS_OF_3) or _is_among(three & _TWO_BYTES, _STOPS_OF_2)
        return (UNSURE if is_stop else NO), at
    if data[at] == _LINE_FEED:
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
        return UNSURE
    return NO if _IS_LOWER[after] and _UNFINISHED[before] else YES


@compiled
def _behind_word(
    data: NDArray[np.uint8], windows: NDArray[np.uint64], at: int, first: int, known: _Abbreviations
) -> int:
    """Whether the stop at `at` ends a sentence, given the word before it.

    The caller has checked that the text after the stop can begin a sentence.
    """
    abbreviations, before_number, longest = known
    size = 0
    while size <= longest and first < at - size and _IN_WORD[data[at - size - 1]]:
        size += 1
    is_whole = at - size == first or _SPACES[data[at - size - 1]]
    if size == 0:
        return YES if at > first and _ENDS_OTHER[data[at - 1]] else UNSURE
    if data[at] != _DOT or size > longest:  # no abbreviations
        return YES
    if size == 1 and is_whole and _IS_INITIAL[data[at - 1]]:
        return NO
    if not is_whole or at < 8:
        return UNSURE
    # The word in lower case, as a little-endian number.
    key = (windows[at - 8] | _LOWER_CASE) >> np.uint64(8 * (8 - size))
    if _is_among(key, before_number):
        return UNSURE
    return NO if _is_among(key, abbreviations) else YES


@compiled
def _width(
    data: NDArray[np.uint8], at: int, which: NDArray[np.bool_], longer: NDArray[np.uint64]
) -> int:
    """The size of the character at `at` if it is in `which` (1 byte) or `longer` (3); else 0."""
    if _is_among(_three_bytes(data, at), longer):
        return 3
    return 1 if which[data[at]] else 0


@compiled
def _three_bytes(data: NDArray[np.uint8], at: int) -> np.uint64:
    """Three bytes as a little-endian number."""
    return np.uint64(data[at] | np.uint64(data[at + 1]) << 8 | np.uint64(data[at + 2]) << 16)


@compiled
def _is_among(key: np.uint64, keys: NDArray[np.uint64]) -> bool:
    for known in keys:  # noqa: SIM110
        if known == key:
            return True
    return False


def _resolve(text: JoinedText, at: NDArray[np.int64], sure: NDArray[np.int64]) -> Iterator[int]:
    """Apply the rules at the stops `at` (bytes); yields the character offsets of sentence ends.

    `sure` are the byte offsets of the sentences that are already known.
    """
    starts = text.character_offsets(sure[np.searchsorted(sure, at, "right") - 1]).tolist()
    documents = np.searchsorted(text.documents, at, "right")
    stops = text.character_offsets(text.documents[documents]).tolist()
    places = text.character_offsets(at).tolist()
    done = last = solid = 0
    begin = -1
    for place, start, stop in zip(places, starts, stops, strict=True):
        match = BREAK.match(text.characters, place, stop) if place >= done else None
        if match:
            done = match.end()
            if begin != max(start, last):
                begin = max(start, last)
                solid = first_non_space(text.characters, begin)
            end = end_at(text.characters, begin, solid, match)
            if end is not None:
                last = end
                yield end


def _cut_overlong(text: JoinedText, ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Cut the sentences that are longer than `MAX_CHARACTERS`."""
    places = text.character_offsets(ends)
    long = np.flatnonzero(np.diff(places) > MAX_CHARACTERS).tolist()
    more = [
        at
        for sentence in long
        for at in cuts(text.characters, places[sentence], places[sentence + 1])
    ]
    return _sorted(ends, text.byte_offsets(np.array(more, np.int64)))


def _sorted(*places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sorted union of the offsets; `numpy.unique` takes ten times as long."""
    joined = np.sort(np.concatenate(places))
    return joined[np.diff(joined, prepend=-1) > 0]
