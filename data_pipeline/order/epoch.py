"""The shuffled order of an epoch: a pure function of (sequences per block, seed, epoch).

The shuffle is nested: the shards are shuffled, then the blocks inside each shard, then the
sequences inside each block. Prefix sums over the shards, then over the blocks of one shard, locate
a position. `data_pipeline.order.slots` says which position a row of a step reads.

`BlockCursors` follows the rows of a job from block to block, without reading token data.

Two or three consecutive blocks form a pool, from which pairs draw their negatives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from data_pipeline.hashing import TextDraw, permutation, scalar_key


@dataclass(frozen=True)
class SequenceCounts:
    """The number of sequences in each block and shard of a split, for one packing and length."""

    per_block: NDArray[np.integer]  # [blocks], possibly memory-mapped
    per_shard: NDArray[np.int64]  # [shards]
    first_block: NDArray[np.int64]  # [shards + 1]

    @property
    def total(self) -> int:
        """The number of samples in an epoch."""
        return int(self.per_shard.sum())


@dataclass(frozen=True)
class BlockSpan:
    """The consecutive positions of an epoch that read one block."""

    block: int  # its number in the index
    first_position: int  # in the epoch's shuffled order
    count: int
    first_sample: int  # sample id of the block's first sequence


class EpochOrder:
    """The shuffled order of one epoch. Memory: 24 bytes for each shard."""

    def __init__(self, counts: SequenceCounts, seed: int, epoch: int) -> None:
        self.counts, self.epoch = counts, epoch
        self._seed = seed
        self._shards = permutation(scalar_key(seed, epoch, TextDraw.SHARDS), len(counts.per_shard))
        self._ends = np.cumsum(counts.per_shard[self._shards])
        self._first_samples = np.cumsum(counts.per_shard) - counts.per_shard

    def span(self, position: int) -> BlockSpan:
        """The block that is read at `position`, 0 <= position < total."""
        nth = int(np.searchsorted(self._ends, position, side="right"))
        shard = int(self._shards[nth])
        start = int(self._ends[nth]) - int(self.counts.per_shard[shard])
        first = int(self.counts.first_block[shard])
        sizes = self.counts.per_block[first : int(self.counts.first_block[shard + 1])]
        blocks = self._shuffled(shard, len(sizes))
        ends = start + np.cumsum(sizes[blocks], dtype=np.int64)
        within = int(np.searchsorted(ends, position, side="right"))
        block = int(blocks[within])
        count = int(sizes[block])
        return BlockSpan(
            block=first + block,
            first_position=int(ends[within]) - count,
            count=count,
            first_sample=int(self._first_samples[shard]) + int(sizes[:block].sum(dtype=np.int64)),
        )

    def pool(self, block: int) -> list[int]:
        """The index numbers of the blocks in the pool of `block`, ascending.

        A pool is two blocks that are consecutive in their shard's order. The last pool of a shard
        with an odd number of blocks has three. A row that reads one of them reads the others just
        before or after it.
        """
        shard = int(np.searchsorted(self.counts.first_block, block, side="right")) - 1
        first, end = self.counts.first_block[shard : shard + 2].tolist()
        blocks = self._shuffled(shard, end - first)
        pools = max(len(blocks) // 2, 1)
        pool = min(int(np.flatnonzero(blocks == block - first)[0]) // 2, pools - 1)
        last = 2 * pool + 2 if pool < pools - 1 else len(blocks)
        return (first + np.sort(blocks[2 * pool : last])).tolist()

    def _shuffled(self, shard: int, blocks: int) -> NDArray[np.int64]:
        return permutation(scalar_key(self._seed, self.epoch, TextDraw.BLOCKS, shard), blocks)

    def within_block(self, span: BlockSpan) -> NDArray[np.int64]:
        """The order of the sequences inside a block: [span.count]."""
        key = scalar_key(self._seed, self.epoch, TextDraw.SEQUENCES, span.block)
        return permutation(key, span.count)


class BlockCursors:
    """The current block of each of R rows, for `Lanes` and for staging."""

    def __init__(self, counts: SequenceCounts, seed: int, rows: int) -> None:
        self.counts = counts
        self.starts = np.zeros(rows, np.int64)  # the first position in each row's block
        self._ends = np.zeros(rows, np.int64)
        self._epochs = np.full(rows, -1)
        self._order = lru_cache(maxsize=4)(partial(EpochOrder, counts, seed))

    def advance(
        self, epochs: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> Iterator[tuple[int, int, BlockSpan]]:
        """Move the rows to new positions; yields (row, epoch, block) for rows that change block.

        `epochs` [R] and `positions` [R] are those that `Slots.locate` returns.
        """
        stale = (epochs != self._epochs) | (positions < self.starts) | (positions >= self._ends)
        for row in np.flatnonzero(stale).tolist():
            epoch = int(epochs[row])
            span = self.order(epoch).span(int(positions[row]))
            self._epochs[row] = epoch
            self.starts[row] = span.first_position
            self._ends[row] = span.first_position + span.count
            yield row, epoch, span

    def order(self, epoch: int) -> EpochOrder:
        """The order of an epoch. Four are cached: a batch and its pairs may straddle two each."""
        return self._order(epoch)
