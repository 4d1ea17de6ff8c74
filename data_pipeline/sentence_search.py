"""The sentences of many documents at once, as `data_pipeline.sentences` finds them.

What ends a sentence for certain, and what does not, is told by the bytes around it, for all
documents together in numpy. That is nine cases in ten; of the others the rules themselves are
asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from data_pipeline.joined_text import LINE_FEED, JoinedText
from data_pipeline.sentences import (
    ABBREVIATIONS,
    BEFORE_NUMBER,
    BREAK,
    LONGEST,
    MAX_CHARACTERS,
    cuts,
    end_at,
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
_AFTER_STOP = _answers(b" ", b"\t.!?\"')]")  # yes: if what comes then can begin a sentence
_CAN_BEGIN = _answers(_CAPITALS_AND_DIGITS, b" \t\"'([-")
_MAY_END = _among(b"\n.!?")
_IN_WORD = _among(_CAPITALS_AND_DIGITS + _LETTERS)
_IS_LOWER = _among(_LETTERS)
_IS_INITIAL = _among(b"ABCDEFGHJKLMNOPQRSTUVWXYZ")  # "I" is a word
_CLOSES = _among(b"\"')]%")
_UNFINISHED = ~_among(b".!?:")
_SOLID = _among(range(33, 127))
# The other characters that may end a sentence; see `BREAK`.
_RARE_STOPS = "\u2026\u3002\uff01\uff1f"


def _keys(words: Iterable[str]) -> NDArray[np.uint64]:
    return np.array([int.from_bytes(word.encode(), "little") for word in words], np.uint64)


_ABBREVIATIONS, _BEFORE_NUMBER = _keys(ABBREVIATIONS), _keys(BEFORE_NUMBER)
_RARE = _keys(_RARE_STOPS)


def find_sentences(text: JoinedText) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The bytes before each sentence of the documents, and all, [sentences + 1]; and the sentences
    before each document, and all, [documents + 1].

    No document may begin or end with white space.
    """
    places = np.flatnonzero(_MAY_END[text.data])
    is_stop = text.data[places] != LINE_FEED
    stops, line_feeds = places[is_stop], places[~is_stop]
    of_stops, of_line_feeds = _at_stops(text, stops), _at_line_feeds(text, line_feeds)
    sure = [stops[of_stops == YES] + 1, line_feeds[of_line_feeds == YES], text.documents]
    asked = [stops[of_stops == ASK], line_feeds[of_line_feeds == ASK], _rare_stops(text)]
    found = _sorted(*sure)
    more = np.fromiter(_ask(text, _sorted(*asked), found), np.int64)
    found = _shortened(text, _sorted(found, text.byte_places(more)))
    return found, np.searchsorted(found, text.documents)


def _at_line_feeds(text: JoinedText, at: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Whether a sentence ends before the line feeds at these bytes."""
    before, after = text.data[at - 1], text.data[at + 1]
    goes_on = _IS_LOWER[after] & _UNFINISHED[before]
    return np.where(_SOLID[before] & (after < 128), np.where(goes_on, NO, YES), ASK)


def _at_stops(text: JoinedText, at: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Whether a sentence ends behind the stops at these bytes."""
    after = _AFTER_STOP[text.data[at + 1]]
    after = np.where(after == YES, _CAN_BEGIN[text.data[at + 2]], after)
    ends = np.flatnonzero(after == YES)
    after[ends] = _behind_word(text, at[ends])
    return after


def _behind_word(text: JoinedText, at: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The same, by the word before, where what follows can begin a sentence."""
    room = at - text.documents[np.searchsorted(text.documents, at, "right") - 1]
    size, inside = np.zeros(len(at), np.int64), np.ones(len(at), bool)
    for back in range(1, LONGEST + 2):
        inside &= (room >= back) & _IN_WORD[text.data[at - back]]
        size += inside
    before = text.data[at - size - 1]
    is_whole = (size == room) | np.isin(before, [*b" \n"])
    # The word in lower case as a number, its first letter lowest.
    letters = text.windows[np.maximum(at - 8, 0)] | np.uint64(0x2020202020202020)
    key = letters >> (8 * (8 - np.minimum(size, 7))).astype(np.uint64)
    known = np.where(np.isin(key, _ABBREVIATIONS), NO, YES)
    known[np.isin(key, _BEFORE_NUMBER) | (size == 0) | ~is_whole | (at < 8)] = ASK
    known[(size == 1) & is_whole & _IS_INITIAL[text.data[at - 1]]] = NO
    known[size > LONGEST] = YES
    known[(size == 0) & _CLOSES[before]] = YES
    known[(text.data[at] != _DOT) & (size > 0)] = YES  # no abbreviations end so
    return known


def _rare_stops(text: JoinedText) -> NDArray[np.int64]:
    """The first bytes of stops beyond ASCII."""
    first = np.flatnonzero(text.data >= 0xE2)
    # Three bytes, the first lowest.
    return first[np.isin(text.windows[first] & np.uint64(0xFFFFFF), _RARE)]


def _ask(text: JoinedText, at: NDArray[np.int64], sure: NDArray[np.int64]) -> Iterator[int]:
    """The character at which each sentence ends that may end at these bytes; `sure` are the bytes
    at which others begin."""
    starts = text.character_places(sure[np.searchsorted(sure, at, "right") - 1]).tolist()
    documents = np.searchsorted(text.documents, at, "right")
    stops = text.character_places(text.documents[documents]).tolist()
    places = text.character_places(at).tolist()
    done = last = 0
    for place, start, stop in zip(places, starts, stops, strict=True):
        match = BREAK.match(text.characters, place, stop) if place >= done else None
        if match:
            done = match.end()
            end = end_at(text.characters, max(start, last), match)
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
