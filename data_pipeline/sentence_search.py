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
_SPACE_AFTER = _answers(b" ", b"\t.!?\"')]")  # yes: if what comes then can begin a sentence
_CAN_BEGIN = _answers(_CAPITALS_AND_DIGITS, b" \t\"'([-")
_MAY_END = _among(b"\n.!?")
_IN_WORD = _among(_CAPITALS_AND_DIGITS + _LETTERS)
_IS_LOWER = _among(_LETTERS)
_IS_INITIAL = _among(b"ABCDEFGHJKLMNOPQRSTUVWXYZ")  # "I" is a word
_ENDS_OTHER = _among(b"\"')]%")  # what ends with these is no abbreviation
_CLOSES, _OPENS = _among(b"\"')]"), _among(b"\"'([-")
_NONE = _among(b"")
_UNFINISHED = ~_among(b".!?:")
_SOLID = _among(range(33, 127))


def _keys(words: Iterable[str]) -> NDArray[np.uint64]:
    return np.array([int.from_bytes(word.encode(), "little") for word in words], np.uint64)


_ABBREVIATIONS, _BEFORE_NUMBER = _keys(ABBREVIATIONS), _keys(BEFORE_NUMBER)
# Characters of three bytes; see `BREAK`.
_RARE_STOPS = _keys("\u2026\u3002\uff01\uff1f")
_CLOSES_TOO, _OPENS_TOO = _keys("\u201d\u2019"), _keys("\u201c\u2018\u2014\u2013")
_THREE_BYTES = np.uint64(0xFFFFFF)


def find_sentences(text: JoinedText) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The bytes before each sentence of the documents, and all, [sentences + 1]; and the sentences
    before each document, and all, [documents + 1].

    No document may begin or end with white space.
    """
    places = np.flatnonzero(_MAY_END[text.data])
    is_stop = text.data[places] != LINE_FEED
    stops, line_feeds = places[is_stop], places[~is_stop]
    (of_stops, ends), of_line_feeds = _at_stops(text, stops), _at_line_feeds(text, line_feeds)
    sure = [ends[of_stops == YES], line_feeds[of_line_feeds == YES], text.documents]
    asked = [stops[of_stops == ASK], line_feeds[of_line_feeds == ASK], _rare_stops(text)]
    found = _sorted(*sure)
    more = np.fromiter(_ask(text, _sorted(*asked), found), np.int64)
    found = _shortened(text, _sorted(found, text.byte_places(more)))
    return found, np.searchsorted(found, text.documents)


def _at_line_feeds(text: JoinedText, at: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Whether a sentence ends before the line feeds at these bytes."""
    before, after = text.data[at - 1], text.data[at + 1]
    goes_on = _IS_LOWER[after] & _UNFINISHED[before]
    behind_text = _SOLID[before] | (_width(text, np.maximum(at - 3, 0), _NONE, _CLOSES_TOO) > 0)
    is_known = (after < 128) | (_width(text, at + 1, _NONE, _OPENS_TOO) > 0)
    return np.where(behind_text & is_known, np.where(goes_on, NO, YES), ASK)


def _at_stops(
    text: JoinedText, at: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Whether a sentence ends with the stops at these bytes, and where."""
    document = np.searchsorted(text.documents, at, "right")
    closed = _width(text, at + 1, _CLOSES, _CLOSES_TOO)
    ends = at + 1 + closed
    begins = ends + 1 + _width(text, ends + 1, _OPENS, _OPENS_TOO)
    answers = _SPACE_AFTER[text.data[ends]]
    answers = np.where(answers == YES, _CAN_BEGIN[text.data[begins]], answers)
    answers[(at + 1 == text.documents[document]) | (begins >= text.documents[document])] = NO
    words = np.flatnonzero((answers == YES) & (closed == 0))
    answers[words] = _behind_word(text, at[words], (at - text.documents[document - 1])[words])
    return answers, ends


def _width(
    text: JoinedText, at: NDArray[np.int64], which: NDArray[np.bool_], longer: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """How many bytes a character has that is one of `which`, or of `longer`; 0 if it is none."""
    is_longer = np.isin(text.windows[np.minimum(at, len(text.windows) - 1)] & _THREE_BYTES, longer)
    return np.where(is_longer, 3, which[text.data[at]])


def _behind_word(
    text: JoinedText, at: NDArray[np.int64], room: NDArray[np.int64]
) -> NDArray[np.uint8]:
    """The same, by the word before, where what follows can begin a sentence; `room` are the bytes
    of the document before."""
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
    known[(size == 0) & _ENDS_OTHER[before]] = YES
    known[(text.data[at] != _DOT) & (size > 0)] = YES  # no abbreviations end so
    return known


def _rare_stops(text: JoinedText) -> NDArray[np.int64]:
    """The first bytes of stops beyond ASCII."""
    first = np.flatnonzero(text.data >= 0xE2)
    # Three bytes, the first lowest.
    return first[np.isin(text.windows[first] & _THREE_BYTES, _RARE_STOPS)]


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
