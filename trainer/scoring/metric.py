"""Metrics: each reads batches, accumulates over ranks and finishes; the scores they report.

A `SummedMetric` adds up numbers; a `GatheredMetric` collects rows, such as predictions and labels,
for scores that are not a mean over examples (F1, correlations). Both give the same result on any
number of ranks.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from trainer.scoring.columns import Column

Outputs = TypeVar("Outputs", contravariant=True)


class Metric(ABC, Generic[Outputs]):
    """The scores of one head of a model."""

    head: str  # the head that is scored; until it is trained, its scores are meaningless
    columns: tuple[Column, ...]
    reads_branches: ClassVar[bool] = False  # of the head, besides its last one
    compares: str | None = None  # the learner with whose head of this name it compares

    @property
    def primary(self) -> Column:
        """The metric's primary score, which stands for it."""
        return self.columns[0]

    def tuned_on(self, scores: Mapping[str, float | None]) -> Metric[Outputs]:
        """The metric for a test file: with what it chose on the validation file of these scores."""
        return self

    @abstractmethod
    def of_batch(self, outputs: Outputs) -> Tensor:
        """The readings of one micro-batch; runs inside the engine, where weights can be read."""

    @abstractmethod
    def empty(self, device: torch.device) -> Tensor:
        """The readings of zero batches."""

    @abstractmethod
    def joined(self, readings: Sequence[Tensor]) -> Tensor:
        """The readings of several sets of batches together; the first one decides the dtype."""

    @abstractmethod
    def over_ranks(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Join each of `parts` over all ranks. Collective, in one exchange."""

    @abstractmethod
    def finish(self, total: Tensor) -> dict[str, float]:
        """The scores by column, without undefined ones."""


class SummedMetric(Metric[Outputs]):
    """A metric of sums: `of_batch` returns [size], accumulated in float64."""

    size: int

    def empty(self, device: torch.device) -> Tensor:
        return torch.zeros(self.size, dtype=torch.float64, device=device)

    def joined(self, readings: Sequence[Tensor]) -> Tensor:
        return functools.reduce(torch.add, readings)

    def over_ranks(self, parts: Sequence[Tensor]) -> list[Tensor]:
        sums = torch.stack(list(parts))
        dist.all_reduce(sums)
        return list(sums)


class GatheredMetric(Metric[Outputs]):
    """A metric of gathered rows: `of_batch` returns [rows, width], of this `dtype` once joined."""

    dtype: ClassVar[torch.dtype] = torch.float64

    def empty(self, device: torch.device) -> Tensor:
        return torch.zeros(0, dtype=self.dtype, device=device)  # `torch.cat` takes it for any width

    def joined(self, readings: Sequence[Tensor]) -> Tensor:
        return torch.cat([rows.to(readings[0]) for rows in readings])

    def over_ranks(self, parts: Sequence[Tensor]) -> list[Tensor]:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [part.cpu() for part in parts])
        return [torch.cat(list(ranks)) for ranks in zip(*everyone, strict=True)]


class PairedMetric(GatheredMetric[Outputs]):
    """A metric of predictions and labels: `of_batch` returns [examples, 2]."""

    def finish(self, total: Tensor) -> dict[str, float]:
        if not len(total):
            return {}
        predictions, labels = total.cpu().numpy().T
        scores = self.scores(predictions, labels)
        return {name: score for name, score in scores.items() if np.isfinite(score)}

    @abstractmethod
    def scores(
        self, predictions: NDArray[np.float64], labels: NDArray[np.float64]
    ) -> Mapping[str, float]:
        """The scores over all examples [N]; NaN for one that is undefined."""


class Tally:
    """The readings of several metrics over some batches, which are joined when they are read."""

    def __init__(self, metrics: Sequence[Metric[Any]], device: torch.device) -> None:
        self.metrics = metrics
        self._read = [[metric.empty(device)] for metric in metrics]

    def add(self, readings: Sequence[Tensor]) -> None:
        """Add a batch: each metric's readings of it."""
        for read, reading in zip(self._read, readings, strict=True):
            read.append(reading)

    def totals(self) -> list[Tensor]:
        """The readings of all batches, by each metric."""
        pairs = zip(self.metrics, self._read, strict=True)
        self.replace([metric.joined(read) for metric, read in pairs])
        return [total for (total,) in self._read]

    def replace(self, totals: Sequence[Tensor]) -> None:
        """Have these readings by each metric, in place of all others."""
        self._read = [[total] for total in totals]

    def finish(self) -> dict[str, float]:
        """The scores of all metrics, by column."""
        scores: dict[str, float] = {}
        for metric, total in zip(self.metrics, self.totals(), strict=True):
            scores |= metric.finish(total)
        return scores


def share_over_ranks(tallies: Sequence[Tally]) -> None:
    """Replace each tally by the sum over all ranks. All have the same metrics. Collective."""
    parts = [tally.totals() for tally in tallies]
    for number, metric in enumerate(tallies[0].metrics if tallies else ()):
        totals = metric.over_ranks([part[number] for part in parts])
        for part, total in zip(parts, totals, strict=True):
            part[number] = total
    for tally, part in zip(tallies, parts, strict=True):
        tally.replace(part)


def joined(tallies: Sequence[Tally], device: torch.device) -> Tally:
    """One tally of the batches of all `tallies`, which have the same metrics."""
    total = Tally(tallies[0].metrics, device)
    for tally in tallies:
        total.add(tally.totals())
    return total
