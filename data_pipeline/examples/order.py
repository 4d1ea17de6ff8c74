"""The order of a task's examples: a pure function of (index, seed, epoch, batch sizes).

An epoch shuffles the blocks, and cuts them into pools of `POOL_BLOCKS`. The examples of a pool are
shuffled, taken `WINDOW` batches at a time, and sorted by length within such a window. Each batch is
then a run of examples of about one length, and the batches of a window come in a shuffled order.
The batches are those of the job: they begin where its steps do, and the examples in front of the
first whole batch of a pool, and behind its last, stay unsorted.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from data_pipeline.hashing import ExampleDraw, permutation, scalar_key
from data_pipeline.order import BatchSizes
from data_pipeline.shards.index import Index

POOL_BLOCKS = 64  # about 32 million tokens: most tasks are one pool
WINDOW = 50  # batches, as many as `transformers` sorts together


class ExampleTable:
    """Where each example of a split is, and how long: from the index alone.

    Examples are numbered in the order in which they were written.
    """

    def __init__(self, index: Index, segments_per_example: int, measured: int) -> None:
        """The first `measured` segments of an example say how long it is."""
        blocks = index.blocks
        self.first_example = _starts(blocks["documents"])  # [blocks + 1]
        self.first_token = _starts(blocks["tokens"])  # [blocks + 1]
        self._segments, self._measured = segments_per_example, measured
        self._sizes = index.sentence_sizes

    @property
    def total(self) -> int:
        """The number of examples."""
        return int(self.first_example[-1])

    def segment_sizes(self, first: int, last: int) -> NDArray[np.int64]:
        """The tokens of each segment [last - first, segments] of these examples."""
        wanted = self._sizes[first * self._segments : last * self._segments]
        return wanted.astype(np.int64).reshape(-1, self._segments)

    def lengths(self, first: int, last: int) -> NDArray[np.int64]:
        """The tokens of these examples [last - first]."""
        return self.segment_sizes(first, last)[:, : self._measured].sum(axis=1)


class ExampleOrder:
    """Which example stands at a position of an epoch."""

    def __init__(self, table: ExampleTable, seed: int, sizes: BatchSizes) -> None:
        self._table, self._seed, self._batches = table, seed, sizes
        self._pool = lru_cache(maxsize=2)(self._ordered)

    def examples(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The examples [R] at these positions [R] of an epoch, by number."""
        numbers = np.empty_like(positions)
        ends = np.cumsum(self._sizes_of_pools(epoch))
        pools = np.searchsorted(ends, positions, side="right")
        for pool in np.unique(pools).tolist():
            first = int(ends[pool - 1]) if pool else 0
            numbers[pools == pool] = self._pool(epoch, pool, first)[
                positions[pools == pool] - first
            ]
        return numbers

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        return np.diff(self._table.first_example)

    def _blocks(self, epoch: int) -> list[NDArray[np.int64]]:
        shuffled = permutation(scalar_key(self._seed, epoch, ExampleDraw.BLOCKS), len(self._counts))
        return [shuffled[at : at + POOL_BLOCKS] for at in range(0, len(shuffled), POOL_BLOCKS)]

    def _sizes_of_pools(self, epoch: int) -> list[int]:
        return [int(self._counts[blocks].sum()) for blocks in self._blocks(epoch)]

    def _ordered(self, epoch: int, number: int, first: int) -> NDArray[np.int64]:
        """The examples of a pool that begins at position `first`, in order."""
        starts, blocks = self._table.first_example, self._blocks(epoch)[number]
        spans = [(int(starts[block]), int(starts[block + 1])) for block in blocks]
        examples = np.concatenate([np.arange(*span) for span in spans])
        lengths = np.concatenate([self._table.lengths(*span) for span in spans])
        shuffled = permutation(
            scalar_key(self._seed, epoch, ExampleDraw.EXAMPLES, number), len(examples)
        )
        slot = epoch * self._table.total + first
        step = self._batches.step_of(slot)
        size, begin = self._batches.at(step), self._batches.before(step)
        head = min(-(slot - begin) % size, len(shuffled))
        batches = (len(shuffled) - head) // size
        key = scalar_key(self._seed, epoch, ExampleDraw.BATCHES, number)
        middle = _by_length(shuffled[head : head + batches * size], lengths, size, key)
        order = np.concatenate([shuffled[:head], middle, shuffled[head + batches * size :]])
        return examples[order]


def _by_length(
    shuffled: NDArray[np.int64], lengths: NDArray[np.int64], size: int, key: int
) -> NDArray[np.int64]:
    """Whole batches of `size`, each of examples of about one length."""
    windows = []
    for at in range(0, len(shuffled), WINDOW * size):
        window = shuffled[at : at + WINDOW * size]
        by_length = window[np.argsort(lengths[window], kind="stable")].reshape(-1, size)
        windows.append(by_length[permutation(scalar_key(key, at), len(by_length))].ravel())
    return np.concatenate([shuffled[:0], *windows])


def _starts(counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """[n + 1] where each of n runs of these sizes begins, and the end of the last."""
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
