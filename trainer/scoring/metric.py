"""Metrics: each reads batches, accumulates over ranks and finishes; the scores they report.

A `SummedMetric` adds up numbers; a `GatheredMetric` collects rows, such as predictions and labels,
for scores that are not a mean over examples (F1, correlations). Both give the same result on any
number of ranks.
"""

from __future__ import annotations

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
    def joined(self, first: Tensor, second: Tensor) -> Tensor:
        """The readings of both sets of batches together."""

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

    def joined(self, first: Tensor, second: Tensor) -> Tensor:
        return first + second

    def over_ranks(self, parts: Sequence[Tensor]) -> list[Tensor]:
        sums = torch.stack(list(parts))
        dist.all_reduce(sums)
        return list(sums)


class GatheredMetric(Metric[Outputs]):
    """A metric of gathered rows: `of_batch` returns [rows, width], float64 once joined."""

    width: int

    def empty(self, device: torch.device) -> Tensor:
        return torch.zeros(0, self.width, dtype=torch.float64, device=device)

    def joined(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([first, second.to(first)])

    def over_ranks(self, parts: Sequence[Tensor]) -> list[Tensor]:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [part.cpu() for part in parts])
        return [torch.cat(list(ranks)) for ranks in zip(*everyone, strict=True)]


class PairedMetric(GatheredMetric[Outputs]):
    """A metric of predictions and labels: `of_batch` returns [examples, 2]."""

    width = 2

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
    """The readings of several metrics over some batches."""

    def __init__(self, metrics: Sequence[Metric[Any]], device: torch.device) -> None:
        self.metrics = metrics
        self.parts = [metric.empty(device) for metric in metrics]

    def add(self, readings: Sequence[Tensor]) -> None:
        """Add a batch: each metric's readings of it."""
        self.parts = [
            metric.joined(part, reading)
            for metric, part, reading in zip(self.metrics, self.parts, readings, strict=True)
        ]

    def finish(self) -> dict[str, float]:
        """The scores of all metrics, by column."""
        scores: dict[str, float] = {}
        for metric, part in zip(self.metrics, self.parts, strict=True):
            scores |= metric.finish(part)
        return scores


def share_over_ranks(tallies: Sequence[Tally]) -> None:
    """Replace each tally by the sum over all ranks. All have the same metrics. Collective."""
    for number, metric in enumerate(tallies[0].metrics if tallies else ()):
        totals = metric.over_ranks([tally.parts[number] for tally in tallies])
        for tally, part in zip(tallies, totals, strict=True):
            tally.parts[number] = part


def joined(tallies: Sequence[Tally], device: torch.device) -> Tally:
    """One tally of the batches of all `tallies`, which have the same metrics."""
    total = Tally(tallies[0].metrics, device)
    for tally in tallies:
        total.add(tally.parts)
    return total
