"""The batches of a task's examples that one rank trains on, or scores."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.examples.order import ExampleOrder
from data_pipeline.examples.reading import ExampleSplit
from data_pipeline.order.slots import BatchSizes
from data_pipeline.reading.batches import Batch


class ExampleStream:
    """A rank's rows of every global batch: a pure function of (index, seed, batch sizes, step).

    Every example comes once in an epoch; a batch may straddle two. A rank owns a contiguous run of
    the rows. Each batch is padded to its own longest sequence.
    """

    def __init__(
        self,
        split: ExampleSplit,
        seed: int,
        sizes: BatchSizes,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Raise DataError when a batch does not divide by the ranks."""
        if any(size % world_size for size in sizes.sizes):
            raise DataError(f"batch.size: must divide by {world_size} ranks")
        self._split, self._sizes = split, sizes
        self._rank, self._world_size = rank, world_size
        self._order = ExampleOrder(split.table, seed, sizes)
        self.samples_per_epoch = split.total

    def batch(self, step: int) -> Batch:
        """The rank's rows of global step `step` (from 0)."""
        rows = self._sizes.at(step) // self._world_size
        mine = np.arange(self._rank * rows, (self._rank + 1) * rows)
        epochs, positions = np.divmod(self._sizes.before(step) + mine, self.samples_per_epoch)
        numbers = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            numbers[epochs == epoch] = self._order.examples(epoch, positions[epochs == epoch])
        return self._split.batch(numbers, epochs)


def all_batches(split: ExampleSplit, rows: int) -> Iterator[Batch]:
    """Every example once, the shortest first, `rows` at a time; the last batch may have fewer."""
    by_length = np.argsort(split.table.lengths(0, split.total), kind="stable")
    for first in range(0, split.total, rows):
        numbers = by_length[first : first + rows]
        yield split.batch(numbers, np.zeros_like(numbers))
