"""Which block each row reads at each step; computed without reading token data."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from data_pipeline.order.epoch import BlockSpan, EpochOrder, SequenceCounts


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
