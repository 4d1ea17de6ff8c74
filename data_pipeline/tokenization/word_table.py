"""A hash table of words, made for hundreds of thousands of lookups per call.

It uses open addressing in a compiled loop, so a lookup takes some tens of nanoseconds. Words with
equal hashes are compared in full, eight bytes (a "step") at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.text.compiled import compiled

FIRST_SLOTS = 1 << 18
STEP = 8  # bytes
SLOT = np.dtype([("number", "<i4"), ("size", "<i4"), ("beginning", "<u8")])
_FREE = np.array((-1, 0, 0), SLOT)
# [n] masks the first n bytes of a step.
_FIRST_BYTES = np.array([(1 << 8 * size) - 1 for size in range(STEP + 1)], "<u8")
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio (Knuth 1998, section 6.4)


class WordTable:
    """Numbers words from 0, in the order in which they first occur."""

    def __init__(self) -> None:
        self._count = 0
        self._slots = np.full(FIRST_SLOTS, _FREE)
        # The steps of each word after its first one, concatenated; with spare room.
        self._offsets = np.zeros(FIRST_SLOTS // 2 + 1, np.int64)
        self._steps = np.zeros(FIRST_SLOTS // 2, np.uint64)

    def __len__(self) -> int:
        return self._count

    @property
    def steps(self) -> int:
        """The number of stored steps; the first step of a word is stored in its slot."""
        return int(self._offsets[self._count])

    def numbers(
        self, windows: NDArray[np.uint64], starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The number of each word [words], and the indices of words that are new [new words].

        Word i spans the bytes from ``starts[i]`` up to ``ends[i]``. New words are added to the
        table. `windows` is `JoinedText.windows`.
        """
        numbers, new = np.empty(len(starts), np.int32), np.empty(len(starts), np.int64)
        known, done = self._count, 0
        while done < len(numbers):
            done, self._count = _number(
                *(windows, starts, ends - starts, self._slots, self._offsets, self._steps),
                *(self._count, done, numbers, new[self._count - known :]),
            )
            if 2 * self._count == len(self._slots):
                self._rehash(2 * len(self._slots))
            elif done < len(numbers):
                self._steps = np.pad(self._steps, (0, len(self._steps) + len(windows) // STEP))
        return numbers, new[: self._count - known]

    def truncate(self, count: int) -> None:
        """Keep only the first `count` words."""
        self._count = min(self._count, count)
        self._rehash(len(self._slots))

    def _rehash(self, slots: int) -> None:
        """Move every word into a table with this many slots."""
        before, self._slots = self._slots, np.full(slots, _FREE)
        self._offsets = np.pad(self._offsets, (0, slots // 2 + 1 - len(self._offsets)))
        _move(before, self._slots, self._offsets, self._steps, self._count)


@compiled
def _number(
    windows: NDArray[np.uint64],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    slots: NDArray[Any],
    offsets: NDArray[np.int64],
    steps: NDArray[np.uint64],
    count: int,
    done: int,
    numbers: NDArray[np.int32],
    new: NDArray[np.int64],
) -> tuple[int, int]:
    """Number words from index `done`, until the table is full.

    Returns (words done, words in the table). Each word's steps are first written after all others;
    they stay there only if the word is new.
    """
    known = count
    for word in range(done, len(starts)):
        start, size, first = starts[word], sizes[word], offsets[count]
        if 2 * count == len(slots) or first + size // STEP > len(steps):
            return word, count
        beginning = windows[start] & _FIRST_BYTES[min(size, STEP)]
        last = first
        for place in range(STEP, size, STEP):
            steps[last] = windows[start + place] & _FIRST_BYTES[min(size - place, STEP)]
            last += 1
        at = _first_slot(beginning, steps, first, last, len(slots))
        while slots[at].number >= 0:
            other = offsets[slots[at].number]
            is_alike = slots[at].size == size and slots[at].beginning == beginning
            if is_alike and (size <= STEP or _equal(steps, other, first, last)):
                break
            at = (at + 1) & (len(slots) - 1)
        if slots[at].number < 0:
            slots[at].number, slots[at].size, slots[at].beginning = count, size, beginning
            new[count - known] = word
            count += 1
            offsets[count] = last
        numbers[word] = slots[at].number
    return len(starts), count


@compiled
def _equal(steps: NDArray[np.uint64], other: int, first: int, last: int) -> bool:
    """Whether the steps from `first` up to `last` equal those from `other`."""
    for step in range(first, last):  # noqa: SIM110
        if steps[step] != steps[other + step - first]:
            return False
    return True


@compiled
def _move(
    before: NDArray[Any],
    slots: NDArray[Any],
    offsets: NDArray[np.int64],
    steps: NDArray[np.uint64],
    count: int,
) -> None:
    """Give new slots to the first `count` words."""
    for old in before:
        if 0 <= old.number < count:
            first, last = offsets[old.number], offsets[old.number + 1]
            at = _first_slot(old.beginning, steps, first, last, len(slots))
            while slots[at].number >= 0:
                at = (at + 1) & (len(slots) - 1)
            slots[at] = old


@compiled
def _first_slot(
    beginning: np.uint64, steps: NDArray[np.uint64], first: int, last: int, slots: int
) -> int:
    """The first slot to probe: multiplicative hashing, whose upper bits are the best mixed."""
    mixed = beginning * _MIX
    for step in range(first, last):
        mixed = (mixed ^ (mixed >> np.uint64(32)) ^ steps[step]) * _MIX
    return int(mixed >> np.uint64(32)) & (slots - 1)
