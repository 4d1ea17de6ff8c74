"""The order of training: which sequence of an epoch's shuffle each row of each step reads.

The shuffle is nested: the shards are shuffled, then the blocks inside each shard, then the
sequences inside each block. Prefix sums over the shards, then over the blocks of one shard, locate
a position.

`BlockCursors` follows the rows of a job from block to block, without reading token data.

Two or three consecutive blocks form a pool, from which pairs draw their negatives.

The rows of all steps are numbered consecutively; such a number is a slot. Epoch e of N samples
covers the slots from e * N up to (e + 1) * N. So a batch may straddle two epochs.

Inside an epoch each row follows a lane. Let a batch have B rows, and let o = slot - e * N. Then the
slot reads sample t = o // B of lane q = o % B. Lane q has N // B + (q < N % B) samples. The lanes
are consecutive intervals of positions, so the map from slot to position

    p = q * (N // B) + min(q, N % B) + t

is a bijection on range(N).

When the batch size changes inside an epoch, some positions are not read yet. They are divided in
the same way among the new number of rows. So every position is still read exactly once. Nothing
here depends on the world size.

A mixture assigns the rows of the global batch to its corpora once, by their weights. Each
corpus then has its own lanes, epochs and order, as if the batch had only its rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
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


@dataclass(frozen=True)
class BatchSizes:
    """The number of rows of the global batch at every step: `sizes[i]` from step `starts[i]` on."""

    starts: tuple[int, ...]  # ascending, the first is 0
    sizes: tuple[int, ...]

    @classmethod
    def constant(cls, size: int) -> BatchSizes:
        """Batch sizes that never change."""
        return cls((0,), (size,))

    @classmethod
    def of(cls, sizes: Mapping[int, int]) -> BatchSizes:
        """Batch sizes from a map of first step -> size."""
        starts = tuple(sorted(sizes))
        return cls(starts, tuple(sizes[start] for start in starts))

    def at(self, step: int) -> int:
        """The number of rows at a step."""
        return self.sizes[bisect_right(self.starts, step) - 1]

    def before(self, step: int) -> int:
        """The number of rows of all steps before `step`."""
        ends = [*self.starts[1:], step]
        return sum(
            size * max(0, min(end, step) - start)
            for start, end, size in zip(self.starts, ends, self.sizes, strict=True)
        )

    def step_of(self, slot: int) -> int:
        """The step that reads the slot (a row, numbered through all steps)."""
        number = max(i for i, start in enumerate(self.starts) if self.before(start) <= slot)
        start = self.starts[number]
        return start + (slot - self.before(start)) // self.sizes[number]

    def between(self, first: int, last: int | None) -> BatchSizes:
        """The sizes from step `first` up to `last` (None: no end); steps count from `first`."""
        inner = [s for s in self.starts if s > first and (last is None or s < last)]
        return self.of({start - first: self.at(start) for start in [first, *inner]})


class Slots:
    """Maps the rows of each step to positions in epochs of `total` samples.

    Epochs are numbered from `first_epoch` on.
    """

    def __init__(self, sizes: BatchSizes, total: int, first_epoch: int = 0) -> None:
        self._sizes, self._total, self._first_epoch = sizes, total, first_epoch
        self._changes = [sizes.before(start) for start in sizes.starts]  # slots
        self._epochs: dict[int, list[_Section]] = {}

    def locate(
        self, step: int, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(epochs [R], positions in those epochs' shuffled orders [R]) of `rows` [R] at a step.

        Exact for slots below 2**63.
        """
        slots = self._sizes.before(step) + rows
        epochs, offsets = np.divmod(slots, self._total)
        positions = np.empty_like(offsets)
        for epoch in np.unique(epochs).tolist():
            at = epochs == epoch
            positions[at] = self._section(epoch, step).positions(offsets[at])
        return epochs + self._first_epoch, positions

    def _section(self, epoch: int, step: int) -> _Section:
        if epoch not in self._epochs:
            self._epochs[epoch] = self._sections(epoch)
            if len(self._epochs) > 2:
                del self._epochs[next(iter(self._epochs))]
        change = self._changes[bisect_right(self._sizes.starts, step) - 1]
        first = max(change - epoch * self._total, 0)
        return next(section for section in self._epochs[epoch] if section.first == first)

    def _sections(self, epoch: int) -> list[_Section]:
        begin, end = epoch * self._total, (epoch + 1) * self._total
        now = bisect_right(self._changes, begin) - 1
        entire_epoch = np.zeros(1, np.int64), np.array([self._total])
        sections = [_Section(0, self._sizes.sizes[now], *entire_epoch)]
        for change, size in zip(
            self._changes[now + 1 :], self._sizes.sizes[now + 1 :], strict=True
        ):
            if change >= end:
                break
            first = change - begin
            sections.append(_Section(first, size, *sections[-1].rest(first - sections[-1].first)))
        return sections


@dataclass(frozen=True)
class _Section:
    """The slots of an epoch, from `first` on, that have one batch size.

    Its lanes divide the positions that are left in the epoch, which are ascending intervals.
    """

    first: int
    batch_size: int
    starts: NDArray[np.int64]  # [intervals]
    lengths: NDArray[np.int64]  # [intervals]

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """[intervals] the cumulative lengths."""
        return np.cumsum(self.lengths)

    def positions(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """The positions that the slots at these offsets in the epoch read."""
        turn, lane = np.divmod(offsets - self.first, self.batch_size)
        return self._position(self._lane_starts(lane) + turn)

    def rest(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(starts, lengths) of the intervals of positions left after `count` slots are read."""
        lanes = np.arange(self.batch_size)
        starts = self._lane_starts(lanes) + count // self.batch_size
        starts += lanes < count % self.batch_size
        ends = self._lane_starts(lanes + 1)
        starts, ends = starts[starts < ends], ends[starts < ends]
        # A lane that crosses the end of an interval is cut there.
        inner = self.ends[:-1]
        lane = np.searchsorted(starts, inner, side="right") - 1
        inside = (lane >= 0) & (starts[lane] < inner) & (inner < ends[lane])
        cuts = np.sort(np.concatenate([starts, inner[inside]]))
        lane = np.searchsorted(starts, cuts, side="right") - 1
        lengths = np.minimum(ends[lane], np.append(cuts[1:], self.ends[-1])) - cuts
        return self._position(cuts), lengths

    def _lane_starts(self, lanes: NDArray[np.int64]) -> NDArray[np.int64]:
        each, extra = divmod(int(self.ends[-1]), self.batch_size)
        return lanes * each + np.minimum(lanes, extra)

    def _position(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Convert indices into the concatenated intervals to positions in the epoch."""
        interval = np.searchsorted(self.ends, places, side="right")
        return self.starts[interval] + places - (self.ends - self.lengths)[interval]


def rows_of_sources(weights: Sequence[float], batch_size: int) -> NDArray[np.int64]:
    """The number of the source that each row of the global batch reads: [batch_size].

    The rows follow the weights (largest remainder). Each source gets rows spread evenly over the
    batch, so that every rank reads about the same mixture.

    Raises DataError if a source would get no row.
    """
    quotas = np.array(weights) / np.sum(weights) * batch_size
    rows = np.floor(quotas).astype(np.int64)
    by_remainder = np.argsort(rows - quotas, kind="stable")
    rows[by_remainder[: batch_size - int(rows.sum())]] += 1
    if not rows[np.array(weights) > 0].all():
        raise DataError(
            f"data.mixture: a corpus gets none of {batch_size} rows; "
            "raise its weight or the global batch size"
        )
    # Source s wants its rows at (0.5 + i) / rows[s] of the batch.
    wanted = np.concatenate([(0.5 + np.arange(count)) / count for count in rows])
    return np.repeat(np.arange(len(rows)), rows)[np.argsort(wanted, kind="stable")]
