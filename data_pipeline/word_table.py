"""A table of words, looked up by the hundred thousand at a time.

A trie whose steps are eight bytes, kept in a hash table with open addressing. All lookups of a call
go through it together in numpy, so that one costs some 100 ns, without an object of its own. Hashes
only say where to look: words are compared.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from data_pipeline.joined_text import FIRST_BYTES

STEP = 8  # bytes
FIRST_SLOTS = 1 << 18
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
        self, windows: NDArray[np.uint64], starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        """The number of each word, [words], from byte `start` to `end`; new ones are taken up.

        `windows` are those of `JoinedText`. No byte of a word may be zero.
        """
        sizes = ends - starts
        numbers = self._follow(np.int32(0), windows[starts] & FIRST_BYTES[np.minimum(sizes, STEP)])
        longer = np.flatnonzero(sizes > STEP)
        done = STEP
        while len(longer):
            steps = (
                windows[starts[longer] + done] & FIRST_BYTES[np.minimum(sizes[longer] - done, STEP)]
            )
            numbers[longer] = self._follow(numbers[longer], steps)
            done += STEP
            longer = longer[sizes[longer] > done]
        return numbers

    def forget_after(self, count: int) -> None:
        """Keep the first `count` numbers only."""
        self._count = min(self._count, count)
        self._hash_again(len(self._slots))

    def _follow(
        self, parents: NDArray[np.int32] | np.int32, steps: NDArray[np.uint64]
    ) -> NDArray[np.int32]:
        """The number that a step leads to from each parent."""
        while 2 * (self._count + len(steps)) > len(self._slots):
            self._hash_again(4 * len(self._slots))
        slots = self._first_slots(parents, steps)
        found = self._look(slots, parents, steps)
        left = np.flatnonzero(found < 0)
        parents = np.broadcast_to(parents, steps.shape)
        while len(left):
            slots[left] = (slots[left] + 1) & (len(self._slots) - 1)
            found[left] = self._look(slots[left], parents[left], steps[left])
            left = left[found[left] < 0]
        return found

    def _look(
        self,
        slots: NDArray[np.int64],
        parents: NDArray[np.int32] | np.int32,
        steps: NDArray[np.uint64],
    ) -> NDArray[np.int32]:
        """The number in each slot, -1 where it is that of another step. A free slot is given to one
        of those that want it, with the next number."""
        found = self._slots[slots]
        free = np.flatnonzero(found < 0)
        if len(free):
            wanted = slots[free]
            self._slots[wanted] = free
            owns = self._slots[wanted] == free
            numbers = np.arange(self._count, self._count + owns.sum(), dtype=np.int32)
            self._slots[wanted[owns]] = numbers
            self._parents[numbers] = np.broadcast_to(parents, steps.shape)[free[owns]]
            self._steps[numbers] = steps[free[owns]]
            self._count += len(numbers)
            found[free] = self._slots[wanted]
        found[(self._steps[found] != steps) | (self._parents[found] != parents)] = -1
        return found

    def _first_slots(
        self, parents: NDArray[np.int32] | np.int32, steps: NDArray[np.uint64]
    ) -> NDArray[np.int64]:
        bits = len(self._slots).bit_length() - 1
        mixed = (steps ^ (parents.astype(np.uint64) * _MIX[1])) * _MIX[0]
        return (mixed >> np.uint64(64 - bits)).view(np.int64)

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
