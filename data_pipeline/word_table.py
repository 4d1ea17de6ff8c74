"""A table of words, looked up by the hundred thousand at a time.

A trie whose steps are eight bytes, kept in a hash table with open addressing. All lookups of a call
go through it together in numpy, so that one costs some 50 ns, without an object of its own. Whatever
has the same hash, words are compared whole.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STEP = 8  # bytes
FIRST_SLOTS = 1 << 16
_KEPT = np.array([(1 << 8 * size) - 1 for size in range(STEP + 1)], "<u8")  # by bytes kept
_MIX = np.array([0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93], np.uint64)


class WordTable:
    """Numbers words in the order in which they are first seen; their beginnings of whole steps have
    numbers too. Number 0 is the empty word."""

    def __init__(self) -> None:
        self._slots = np.full(FIRST_SLOTS, -1, np.int32)  # the number in each slot; -1: free
        # Of each number, with room for more:
        self._parents = np.zeros(FIRST_SLOTS // 2, np.int32)
        self._steps = np.zeros(FIRST_SLOTS // 2, np.uint64)
        self._count = 1

    def __len__(self) -> int:
        return self._count

    def numbers(
        self, text: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        """The number of each word `text[start:end]`, [words]; new ones are taken up.

        No byte of a word may be zero, and `STEP` bytes must follow the last word.
        """
        # Every eight neighbouring bytes as one number; nothing is copied.
        windows = np.ndarray((len(text) - STEP + 1,), "<u8", text, strides=(1,))
        numbers = np.zeros(len(starts), np.int32)
        left, at, sizes = np.arange(len(starts)), starts, ends - starts
        while len(left):
            steps = windows[at] & _KEPT[np.minimum(sizes, STEP)]
            numbers[left] = self._follow(numbers[left], steps)
            goes_on = sizes > STEP
            left, at, sizes = left[goes_on], at[goes_on] + STEP, sizes[goes_on] - STEP
        return numbers

    def forget_after(self, count: int) -> None:
        """Keep the first `count` numbers only."""
        self._count = min(self._count, count)
        self._hash_again(len(self._slots))

    def _follow(
        self, parents: NDArray[np.int32], steps: NDArray[np.uint64]
    ) -> NDArray[np.int32]:
        """The number that a step leads to from each parent."""
        while 2 * (self._count + len(parents)) > len(self._slots):
            self._hash_again(2 * len(self._slots))
        found = np.empty(len(parents), np.int32)
        left, slots = np.arange(len(parents)), self._first_slots(parents, steps)
        while len(left):
            numbers = self._slots[slots]
            if (free := np.flatnonzero(numbers < 0)).size:
                self._take_up(left[free], slots[free], parents, steps)
                numbers = self._slots[slots]
            same = (self._parents[numbers] == parents[left]) & (self._steps[numbers] == steps[left])
            found[left[same]] = numbers[same]
            left, slots = left[~same], (slots[~same] + 1) & (len(self._slots) - 1)
        return found

    def _take_up(
        self,
        wanting: NDArray[np.int64],
        slots: NDArray[np.int64],
        parents: NDArray[np.int32],
        steps: NDArray[np.uint64],
    ) -> None:
        """Give each free slot to one of those that want it, and that one the next number."""
        self._slots[slots] = wanting
        owns = self._slots[slots] == wanting
        owners = wanting[owns]
        numbers = np.arange(self._count, self._count + len(owners), dtype=np.int32)
        self._slots[slots[owns]] = numbers
        self._parents[numbers], self._steps[numbers] = parents[owners], steps[owners]
        self._count += len(owners)

    def _first_slots(
        self, parents: NDArray[np.int32], steps: NDArray[np.uint64]
    ) -> NDArray[np.int64]:
        mixed = (steps ^ (parents.astype(np.uint64) * _MIX[1])) * _MIX[0]
        mixed = (mixed ^ (mixed >> np.uint64(32))) * _MIX[1]
        bits = len(self._slots).bit_length() - 1
        return (mixed >> np.uint64(64 - bits)).astype(np.int64)

    def _hash_again(self, slots: int) -> None:
        """Put every number into a slot of a table of so many."""
        self._slots = np.full(slots, -1, np.int32)
        room = slots // 2 - len(self._parents)
        self._parents = np.pad(self._parents, (0, room))
        self._steps = np.pad(self._steps, (0, room))
        left = np.arange(1, self._count, dtype=np.int32)
        at = self._first_slots(self._parents[left], self._steps[left])
        while len(left):
            free = self._slots[at] < 0
            self._slots[at[free]] = left[free]
            homeless = self._slots[at] != left
            left, at = left[homeless], (at[homeless] + 1) & (slots - 1)
