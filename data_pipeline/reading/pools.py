"""Open pools: the pairs of a few blocks, with their text.

The index, the seed and the epoch determine the blocks and the pairs of a pool. So an unreadable
block changes no pair; it only leaves some pairs without text. A pool is opened once for all of its
blocks, since they are read one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from data_pipeline.hashing import TextDraw, scalar_key
from data_pipeline.order.epoch import EpochOrder
from data_pipeline.packing.pairs import PairSpans, Pool, pair_spans
from data_pipeline.packing.sequences import PackingRules, stream
from data_pipeline.reading.corpus import CorpusSplit
from data_pipeline.shards.blocks import Block


@dataclass(frozen=True)
class OpenPool:
    """The text of a pool, and its pairs as spans of it, block after block."""

    blocks: list[int]  # ascending
    counts: list[int]  # pairs in each block
    text: NDArray[np.integer]  # the concatenated streams of the blocks
    spans: NDArray[np.int64]  # [5, pairs] the fields of `PairSpans`
    readable: NDArray[np.bool_]  # [pairs] True if both segments could be read

    def of_block(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(spans [5, pairs], readable [pairs]) of one of its blocks."""
        nth = self.blocks.index(block)
        first = sum(self.counts[:nth])
        mine = slice(first, first + self.counts[nth])
        return self.spans[:, mine], self.readable[mine]


class Pools:
    """The open pools of one split. A pool stays open while a caller holds a reference to it."""

    def __init__(
        self,
        split: CorpusSplit,
        rules: PackingRules,
        seed: int,
        read: Callable[[int], Block | None],
    ) -> None:
        """`read` returns a block by its index number, or None for a block that is skipped."""
        self._split, self._rules, self._seed, self._read = split, rules, seed, read
        self._counts = split.sequence_counts(rules).per_block
        self._open: WeakValueDictionary[tuple[int, int], OpenPool] = WeakValueDictionary()

    def of(self, order: EpochOrder, block: int) -> OpenPool:
        """The pool of a block, with its pairs in the epoch of `order`."""
        blocks = order.pool(block)
        key = (order.epoch, blocks[0])
        pool = self._open.get(key)
        if pool is None:
            pool = self._open[key] = self._pack(
                blocks, scalar_key(self._seed, key[0], TextDraw.PAIRS, key[1])
            )
        return pool

    def _pack(self, blocks: list[int], key: int) -> OpenPool:
        bounds, documents = zip(*map(self._split.index.boundaries_of, blocks), strict=True)
        pairs = pair_spans(Pool(bounds, documents), self._rules, key)
        sizes = [len(block.tokens) + len(block.documents) for block in bounds]
        read = [self._read(number) for number in blocks]
        found = np.array([block is not None for block in read])
        firsts, seconds = (
            np.searchsorted(np.cumsum(sizes), starts, side="right")
            for starts in (pairs.first_starts, pairs.second_starts)
        )
        return OpenPool(
            blocks,
            counts=[int(self._counts[number]) for number in blocks],
            text=np.concatenate([self._stream(*one) for one in zip(read, sizes, strict=True)]),
            spans=np.stack([getattr(pairs, field.name) for field in fields(PairSpans)]),
            readable=found[firsts] & found[seconds],
        )

    def _stream(self, block: Block | None, size: int) -> NDArray[np.integer]:
        if block is None:
            return np.zeros(size, np.uint16)
        return stream(block, self._split.vocabulary.sep)
