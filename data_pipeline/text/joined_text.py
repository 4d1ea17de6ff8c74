"""The concatenated documents of a chunk, as characters and as bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

PADDING = 8  # bytes
SPACE, LINE_FEED = b" \n"
ASCII_SPACE = np.isin(np.arange(256), [*b"\t\n\v\f\r "])
# Unicode's White_Space beyond ASCII. Python's \s matches four more control characters.
_OTHER_SPACE = re.compile("[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")


@dataclass(frozen=True)
class JoinedText:
    """Concatenated documents."""

    characters: str
    encoded: bytes  # in UTF-8
    data: NDArray[np.uint8]  # [bytes + PADDING] the same, zero-padded
    documents: NDArray[np.int64]  # [documents + 1] byte offsets

    @classmethod
    def of(cls, documents: Sequence[str]) -> JoinedText:
        """Concatenate `documents`."""
        text = "".join(documents)
        encoded = text.encode()
        data = np.frombuffer(encoded + bytes(PADDING), np.uint8)
        joined = cls(text, encoded, data, offsets([len(document) for document in documents]))
        return replace(joined, documents=joined.byte_offsets(joined.documents))

    def with_spaces(self) -> JoinedText:
        """A copy in which `data` has a space for each line feed."""
        return replace(self, data=np.where(self.data == LINE_FEED, np.uint8(SPACE), self.data))

    @cached_property
    def windows(self) -> NDArray[np.uint64]:
        """[bytes + 1] each byte and the seven after it as one little-endian number; a view."""
        return np.ndarray((len(self.data) - 7,), "<u8", self.data, strides=(1,))

    @cached_property
    def white(self) -> NDArray[np.bool_]:
        """[bytes + PADDING] True at the last byte of each white-space character."""
        white = ASCII_SPACE[self.data]
        if not self.characters.isascii():
            ends = [match.end() for match in _OTHER_SPACE.finditer(self.characters)]
            white[self.byte_offsets(np.array(ends, np.int64)) - 1] = True
        return white

    def byte_offsets(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert character offsets to byte offsets."""
        shifted = self._continuations - np.arange(len(self._continuations))
        return places + np.searchsorted(shifted, places, "right")

    def character_offsets(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert byte offsets to character offsets."""
        return places - np.searchsorted(self._continuations, places)

    @cached_property
    def _continuations(self) -> NDArray[np.int64]:
        """The offsets of UTF-8 continuation bytes."""
        return np.flatnonzero(self.data.view(np.int8) < -64)


def offsets(sizes: ArrayLike) -> NDArray[np.int64]:
    """The offsets of concatenated parts of these sizes, the end included: [parts + 1]."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
