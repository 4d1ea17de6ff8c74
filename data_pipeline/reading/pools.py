"""Pools that are open: the pairs of a few blocks and the text that they are made of.

Which blocks are a pool, and which pairs it makes, follows from the index, the seed and the epoch
alone; so what cannot be read changes no pair, it only takes the text from some. Reading a block in
its epoch's order opens its pool once for all of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from data_pipeline.hashing import scalar_key
from data_pipeline.order.epoch import EpochOrder
from data_pipeline.packing.pairs import PairSpans, Pool, pair_spans
from data_pipeline.packing.sequences import PackingRules, stream
from data_pipeline.reading.corpus import CorpusSplit
from data_pipeline.shards.blocks import Block

PAIRS = 4  # what a hash decides; part of its key, beside those of `order`


@dataclass(frozen=True)
class OpenPool:
    """The text of a pool, and its pairs as places in it, block after block."""

    blocks: list[int]  # ascending
    counts: list[int]  # pairs of each block
    text: NDArray[np.integer]  # the streams of the blocks end to end
    spans: NDArray[np.int64]  # [5, pairs] the fields of `PairSpans`
    readable: NDArray[np.bool_]  # [pairs] whether the text of both segments could be read

    def of_block(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(spans [5, sequences], readable [sequences]) of one of its blocks."""
        nth = self.blocks.index(block)
        first = sum(self.counts[:nth])
        mine = slice(first, first + self.counts[nth])
        return self.spans[:, mine], self.readable[mine]


class Pools:
    """The pools of one split. One is kept as long as somebody holds it."""

    def __init__(
        self,
        split: CorpusSplit,
        rules: PackingRules,
        seed: int,
        read: Callable[[int], Block | None],
    ) -> None:
        """`read` returns a block by its number in the index, None for one that is to be skipped."""
        self._split, self._rules, self._seed, self._read = split, rules, seed, read
        self._counts = split.sequence_counts(rules).per_block
        self._open: WeakValueDictionary[tuple[int, int], OpenPool] = WeakValueDictionary()

    def of(self, order: EpochOrder, block: int) -> OpenPool:
        """The pool that a block is in, with the pairs of the epoch of `order`."""
        blocks = order.pool(block)
        key = (order.epoch, blocks[0])
        pool = self._open.get(key)
        if pool is None:
            pool = self._open[key] = self._pack(
                blocks, scalar_key(self._seed, key[0], PAIRS, key[1])
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
