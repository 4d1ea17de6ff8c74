"""The documents of a chunk end to end, as characters and as bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

PADDING = 8  # bytes
FIRST_BYTES = np.array([(1 << 8 * size) - 1 for size in range(9)], "<u8")  # masks, by how many
SPACE, LINE_FEED = b" \n"
ASCII_SPACE = np.isin(np.arange(256), [*b"\t\n\v\f\r "])
# Unicode's White_Space beyond ASCII; Python's \s has four control characters more.
_OTHER_SPACE = re.compile("[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")


@dataclass(frozen=True)
class JoinedText:
    """Documents end to end."""

    characters: str
    encoded: bytes  # in UTF-8
    data: NDArray[np.uint8]  # [bytes + PADDING] the same with zeros behind
    documents: NDArray[np.int64]  # [documents + 1] bytes before each, and all

    @classmethod
    def of(cls, documents: Sequence[str]) -> JoinedText:
        """These documents."""
        text = "".join(documents)
        encoded = text.encode()
        data = np.frombuffer(encoded + bytes(PADDING), np.uint8)
        joined = cls(text, encoded, data, edges([len(document) for document in documents]))
        return replace(joined, documents=joined.byte_places(joined.documents))

    def with_spaces(self) -> JoinedText:
        """The same with spaces for line feeds in `data`."""
        return replace(self, data=np.where(self.data == LINE_FEED, np.uint8(SPACE), self.data))

    @cached_property
    def windows(self) -> NDArray[np.uint64]:
        """[bytes + 1] each byte and the seven behind it as one number; nothing is copied."""
        return np.ndarray((len(self.data) - 7,), "<u8", self.data, strides=(1,))

    @cached_property
    def white(self) -> NDArray[np.bool_]:
        """[bytes + PADDING] where a character of white space ends."""
        white = ASCII_SPACE[self.data]
        if not self.characters.isascii():
            ends = [match.end() for match in _OTHER_SPACE.finditer(self.characters)]
            white[self.byte_places(np.array(ends, np.int64)) - 1] = True
        return white

    def byte_places(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places between characters, in bytes."""
        shifted = self._continuations - np.arange(len(self._continuations))
        return places + np.searchsorted(shifted, places, "right")

    def character_places(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The reverse of `byte_places`."""
        return places - np.searchsorted(self._continuations, places)

    @cached_property
    def _continuations(self) -> NDArray[np.int64]:
        """All bytes but the first of each character."""
        return np.flatnonzero(self.data.view(np.int8) < -64)


def edges(sizes: ArrayLike) -> NDArray[np.int64]:
    """Where parts of these sizes, end to end, begin and end: [parts + 1]."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
