"""The batches of examples that one rank trains on, or scores: of one task, or of several (MT-DNN).

An epoch of several tasks has the batches of every task in a shuffled order, so that tasks come in
proportion to their sizes and every example is read once (algorithm 1 of arXiv 1901.11504). It is a
pure function of (seed, epoch, step): it depends neither on the ranks nor on restarts.
"""

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.examples.reading import ExampleOrder, ExampleSplit
from data_pipeline.hashing import ExampleDraw, permutation, scalar_key
from data_pipeline.order import BatchSizes
from data_pipeline.reading.batches import Batch


class ExampleStream:
    """A rank's rows of every global batch: a pure function of (index, seed, batch sizes, step).

    Every example comes once in an epoch; a batch may straddle two. A rank owns a contiguous run of
    the rows. Each batch is padded to its own longest sequence.
    """

    def __init__(
        self, split: ExampleSplit, seed: int, sizes: BatchSizes, rank: int = 0, world_size: int = 1
    ) -> None:
        """Raise DataError when a batch does not divide by the ranks."""
        if any(size % world_size for size in sizes.sizes):
            raise DataError(f"batch.size: must be a multiple of the {world_size} ranks")
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


def all_batches(
    split: ExampleSplit, rows: int, rank: int = 0, world_size: int = 1
) -> Iterator[Batch]:
    """A rank's share of every example once, the shortest first, `rows` at a time on each rank.

    The ranks get equally many rows; one without an example repeats another, without labels.
    """
    by_length = np.argsort(split.table.lengths(0, split.total), kind="stable")
    for first in range(0, split.total, rows * world_size):
        numbers = by_length[first : first + rows * world_size]
        mine, is_repeated = equal_share(len(numbers), rank, world_size)
        batch = split.batch(numbers[mine], np.zeros_like(mine))
        yield batch.without_labels(is_repeated)


def equal_share(
    total: int, rank: int, world_size: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """A rank's equal share of `total` rows: their numbers, and which ones only repeat others."""
    size = -(-total // world_size)
    rows = np.arange(rank * size, (rank + 1) * size)
    return rows % total, rows >= total


class TaskStep(NamedTuple):
    """The task of a step of the job, and which of that task's own batches it reads, from 0."""

    task: str
    batch: int


class _Epoch(NamedTuple):
    """The number of each step's task, and of the task's batch, in an epoch; int64 [steps]."""

    tasks: NDArray[np.int64]
    batches: NDArray[np.int64]


class TaskSchedule:
    """The task of every step.

    A batch may straddle two epochs of its task, so that after e epochs a task of n examples has had
    ceil(e * n / B) batches of B.
    """

    def __init__(self, examples: Mapping[str, int], seed: int, size: int) -> None:
        """examples: how many each task trains on. size: examples of a batch."""
        self._names, self._counts = [*examples], [*examples.values()]
        self._seed, self._size = seed, size
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    def at(self, step: int) -> TaskStep:
        """The task of the job's `step`."""
        epoch = self._epoch_of(step)
        order, place = self._epoch(epoch), step - self._before(epoch)
        return TaskStep(self._names[int(order.tasks[place])], int(order.batches[place]))

    def steps(self, epochs: float) -> int:
        """The steps that this many epochs take."""
        exact = Fraction(str(epochs))  # 1.1 - 1 is more than 0.1, and would take a step more
        complete = math.floor(exact)
        before, after = self._before(complete), self._before(complete + 1)
        return before + math.ceil((exact - complete) * (after - before))

    def _before(self, epoch: int) -> int:
        """The steps of all epochs before this one."""
        return sum(self._batches_before(epoch))

    def _batches_before(self, epoch: int) -> list[int]:
        return [-(-epoch * count // self._size) for count in self._counts]

    def _epoch_of(self, step: int) -> int:
        # Each task has at most one batch more than its examples fill.
        least = (step - len(self._counts)) * self._size // sum(self._counts)
        epoch = max(0, least)
        while self._before(epoch + 1) <= step:
            epoch += 1
        return epoch

    def _shuffled(self, epoch: int) -> _Epoch:
        first, last = map(np.array, (self._batches_before(epoch), self._batches_before(epoch + 1)))
        tasks = np.repeat(np.arange(len(first)), last - first)
        tasks = tasks[permutation(scalar_key(self._seed, epoch, ExampleDraw.TASKS), len(tasks))]
        batches = np.empty_like(tasks)
        for number, (begin, end) in enumerate(zip(first, last, strict=True)):
            batches[tasks == number] = np.arange(begin, end)
        return _Epoch(tasks, batches)


class JointStream:
    """A rank's rows of every global batch of several tasks; each batch is of one of them."""

    def __init__(
        self,
        splits: Mapping[str, ExampleSplit],
        seed: int,
        size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Raise DataError when a batch does not divide by the ranks."""
        where = BatchSizes.constant(size), rank, world_size
        self._streams = {name: ExampleStream(split, seed, *where) for name, split in splits.items()}
        examples = {name: split.total for name, split in splits.items()}
        self.schedule = TaskSchedule(examples, seed, size)

    def batch(self, step: int) -> Batch:
        """The rank's rows of global step `step` (from 0)."""
        task_step = self.schedule.at(step)
        return self._streams[task_step.task].batch(task_step.batch)


def open_stream(
    splits: Mapping[str, ExampleSplit],
    seed: int,
    sizes: BatchSizes,
    rank: int = 0,
    world_size: int = 1,
) -> ExampleStream | JointStream:
    """A rank's rows of every global batch of a task, or of several; DataError as they raise it."""
    if len(splits) > 1:
        return JointStream(splits, seed, sizes.at(0), rank, world_size)
    (split,) = splits.values()
    return ExampleStream(split, seed, sizes, rank, world_size)
