"""The documents of a chunk end to end, as characters and as bytes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

PADDING = 8  # bytes
ASCII_SPACE = np.isin(np.arange(256), [*b"\t\n\v\f\r "])
# Unicode's White_Space beyond ASCII; Python's \s has four control characters more.
_OTHER_SPACE = re.compile("[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")


@dataclass(frozen=True)
class JoinedText:
    """Documents end to end."""

    characters: str
    data: NDArray[np.uint8]  # [bytes + PADDING] in UTF-8, perhaps without line feeds; zeros behind
    sentences: NDArray[np.int64]  # [sentences + 1] bytes before each, and all
    documents: NDArray[np.int64]  # [documents + 1] sentences before each, and all

    @classmethod
    def of(
        cls, documents: Sequence[str], ends: Sequence[Sequence[int]], line_feeds: bool
    ) -> JoinedText:
        """`ends` are those of the sentences of each document, in characters; `line_feeds` says
        whether these are spaces."""
        text = "".join(documents)
        encoded = text.replace("\n", " " if line_feeds else "\n").encode()
        data = np.frombuffer(encoded + bytes(PADDING), np.uint8)
        sentences = edges([len(stops) for stops in ends])
        before = edges([len(document) for document in documents])[:-1]
        inside = np.fromiter(itertools.chain.from_iterable(ends), np.int64, sentences[-1])
        stops = np.concatenate([[0], inside + np.repeat(before, np.diff(sentences))])
        stops = _byte_places(data, stops)
        return cls(text, data, stops, sentences)

    @cached_property
    def white(self) -> NDArray[np.bool_]:
        """[bytes + PADDING] where a character of white space ends."""
        white = ASCII_SPACE[self.data]
        if not self.characters.isascii():
            ends = [match.end() for match in _OTHER_SPACE.finditer(self.characters)]
            white[_byte_places(self.data, np.array(ends, np.int64)) - 1] = True
        return white


def _byte_places(data: NDArray[np.uint8], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Places between characters, in bytes of UTF-8."""
    more = np.flatnonzero(data.view(np.int8) < -64)  # all but the first byte of each character
    return places + np.searchsorted(more - np.arange(len(more)), places, "right")


def edges(sizes: ArrayLike) -> NDArray[np.int64]:
    """Where parts of these sizes, end to end, begin and end: [parts + 1]."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
