"""Which block each row reads from step to step; no token data is read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from data_pipeline.order.epoch import BlockSpan, EpochOrder, SequenceCounts


class BlockWalk:
    """Follows R rows through the blocks of a split, for `Lanes` and for staging."""

    def __init__(self, counts: SequenceCounts, seed: int, rows: int) -> None:
        self.counts, self._seed = counts, seed
        self.starts = np.zeros(rows, np.int64)  # the first position of each row's block
        self._ends = np.zeros(rows, np.int64)
        self._epochs = np.full(rows, -1)
        self._orders: OrderedDict[int, EpochOrder] = OrderedDict()

    def moved(
        self, epochs: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> Iterator[tuple[int, int, BlockSpan]]:
        """(row, epoch, block) for each row that is not in the block that it was in before.

        `epochs` and `positions` [R] are where `Slots.locate` says that the rows are now.
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
        """The order of an epoch; four are kept: a batch may straddle two, and so may its pairs."""
        if epoch not in self._orders:
            self._orders[epoch] = EpochOrder(self.counts, self._seed, epoch)
            if len(self._orders) > 4:
                self._orders.popitem(last=False)
        return self._orders[epoch]
