"""Denominators of the losses: counts of a batch that are known before its first forward pass.

A denominator is a pure function of a rank's rows of the global batch, with a name by which terms
declare it. A name that is not registered is the name of a target, and stands for the count of its
labels. One all-reduce sums the denominators in use over the ranks, with the step's other counts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline import DEFAULT_VIEW, MASKED, Batch

ATTENDED, ATTENDED_PAIRS, ROWS = "attended", "attended_pairs", "rows"
Count = Callable[[Batch], float]
InView = tuple[str, str]  # a view, and the name of a denominator
Totals = Mapping[InView, Tensor]  # their counts over all ranks, 1 where it is 0, float32
Key = TypeVar("Key", bound=Hashable)


def labelled(target: str, batch: Batch) -> int:
    """The number of labels of a target; 0 for a batch without it."""
    return int(batch.targets[target].is_labelled.sum()) if target in batch.targets else 0


def attended(batch: Batch) -> int:
    """Positions that are not padding."""
    return int(np.count_nonzero(batch.attention_mask))


def _masked(batch: Batch) -> int:
    """Positions with a masked-LM label, including those that are yet to be chosen."""
    return labelled(MASKED, batch) if batch.to_mask is None else int(batch.to_mask.sum())


def _lengths(batch: Batch) -> np.ndarray:
    """The lengths of the texts: of the sequences, or of the documents in them."""
    texts = batch.documents.reshape(-1, batch.input_ids.shape[-1]).astype(np.int64)
    by_sequence = texts + np.arange(len(texts))[:, None] * (texts.max(initial=0) + 1)
    return np.bincount(by_sequence[texts > 0])


_COUNTS: dict[str, Count] = {
    MASKED: _masked,
    ATTENDED: attended,
    ATTENDED_PAIRS: lambda batch: int((_lengths(batch) ** 2).sum()),  # in one text
    ROWS: lambda batch: int((_lengths(batch) > 0).sum()),  # with any token
}


def register(name: str, count: Count) -> None:
    """Register a denominator under `name`, which must be new. For plugins."""
    assert name not in _COUNTS, name
    _COUNTS[name] = count


class WeightedLabels(str):
    """The denominator of labels with weights: the sum of the weights of a target's labels.

    Its name holds target and weights. The labels are classes, or, if an example has several, right
    (1) or wrong (0), each with its own weight.
    """

    target: str
    weights: np.ndarray

    @classmethod
    def of(cls, target: str, weights: Sequence[float]) -> WeightedLabels:
        """Of the weights of a target's classes."""
        name = cls(f"{target}{[*weights]}")
        name.target, name.weights = target, np.array(weights)
        return name

    def total(self, batch: Batch) -> float:
        """The sum over a batch; 0 for one without the target."""
        target = batch.targets.get(self.target)
        if target is None:
            return 0.0
        is_labelled = target.is_labelled
        if target.positions is None and target.labels.ndim == 2:
            return float((is_labelled * self.weights).sum())
        return float(self.weights[target.labels[is_labelled]].sum())


def count(name: str, batch: Batch) -> float:
    """A denominator's count of these rows; of aligned spans, the tokens of a view in them."""
    if name in batch.runs:
        return int(batch.runs[name].sizes.sum())
    if isinstance(name, WeightedLabels):
        return name.total(batch)
    return _COUNTS[name](batch) if name in _COUNTS else labelled(name, batch)


@dataclass(frozen=True)
class StepSums:
    """Sums over all ranks that are known before a step's first forward pass. Scalars on the device.

    tokens: attended positions by view; positions: with padding; unreadable: sequences that could
    not be read; seconds: training time before the step, by rank 0's clock; all float64. shares:
    quotients of two counts, by name.
    """

    totals: Totals
    tokens: Mapping[str, Tensor]
    positions: Tensor
    unreadable: Tensor
    seconds: Tensor
    shares: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def over_ranks(
        cls,
        batch: Batch,
        denominators: Iterable[InView],
        seconds: float,
        device: torch.device,
        shares: Mapping[str, tuple[InView, InView]] | None = None,
    ) -> StepSums:
        """Sum the `denominators` in use, in one all-reduce. Collective."""
        quotients = shares or {}
        in_use = sorted({*denominators, *chain.from_iterable(quotients.values())})
        views = sorted({DEFAULT_VIEW, *(view for view, _ in in_use)})
        values: dict[Hashable, float] = {
            (view, name): count(name, batch.view(view)) for view, name in in_use
        }
        values |= {("tokens", view): attended(batch.view(view)) for view in views}
        values |= {
            "positions": batch.input_ids.size,
            "unreadable": 0 if batch.readable is None else int((~batch.readable).sum()),
            "seconds": seconds if dist.get_rank() == 0 else 0.0,
        }
        sums = sum_over_ranks(values, device)
        totals = {key: _at_least_one(sums[key]).float() for key in in_use}
        tokens = {view: sums["tokens", view] for view in views}
        by_name = {
            name: sums[counted] / _at_least_one(sums[divisor])
            for name, (counted, divisor) in quotients.items()
        }
        facts = sums["positions"], sums["unreadable"], sums["seconds"]
        return cls(totals, tokens, *facts, by_name)

    def stacked(self) -> Tensor:
        """Positions, unreadable sequences, seconds, tokens by view, shares: float64."""
        by_name = (*self.tokens.values(), *self.shares.values())
        return torch.stack([self.positions, self.unreadable, self.seconds, *by_name])


def _at_least_one(total: Tensor) -> Tensor:
    """The divisor of a loss: 1 where nothing is labelled; the weights of labels may sum to less."""
    return torch.where(total > 0, total, 1.0)


def sum_over_ranks(values: Mapping[Key, float], device: torch.device) -> dict[Key, Tensor]:
    """Values summed over the ranks, as float64 scalars. All ranks pass equal keys. Collective.

    float64 represents integers exactly up to 2**53.
    """
    summed = torch.tensor(list(values.values()), dtype=torch.float64)
    summed = summed.to(device, non_blocking=True)
    dist.all_reduce(summed)
    return dict(zip(values, summed.unbind(), strict=True))
