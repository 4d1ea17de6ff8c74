"""Denominators of the losses: counts of a batch that are known before its first forward pass.

A denominator is a pure function of a rank's rows of the global batch, with a name by which terms
declare it. A name that is not registered is the name of a target, and stands for the count of its
labels. One all-reduce sums the denominators in use over the ranks, with the step's other counts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from configs.errors import ConfigError
from configs.typed import shown
from data_pipeline import DEFAULT_VIEW, MASKED, Batch

ATTENDED, ATTENDED_PAIRS, ROWS = "attended", "attended_pairs", "rows"
Count = Callable[[Batch], float]
InView = tuple[str, str]  # a view, and the name of a denominator
Totals = Mapping[InView, Tensor]  # their counts over all ranks, 1 where that is 0, float32


def labelled(target: str, batch: Batch) -> int:
    """The number of labels of a target; 0 for a batch without it.

    Masked positions that are yet to be chosen count.
    """
    if target == MASKED and batch.to_mask is not None:
        return int(batch.to_mask.sum())
    return int(batch.targets[target].is_labelled.sum()) if target in batch.targets else 0


def attended(batch: Batch) -> int:
    """Positions that are not padding."""
    return int(np.count_nonzero(batch.attention_mask))


def _lengths(batch: Batch) -> NDArray[Any]:
    """The lengths of the texts: of the sequences, or of the documents in them."""
    texts = batch.documents.reshape(-1, batch.input_ids.shape[-1]).astype(np.int64)
    by_sequence = texts + np.arange(len(texts))[:, None] * (texts.max(initial=0) + 1)
    return np.bincount(by_sequence[texts > 0])


_COUNTS: dict[str, Count] = {
    ATTENDED: attended,
    ATTENDED_PAIRS: lambda batch: int((_lengths(batch) ** 2).sum()),  # in one text
    ROWS: lambda batch: int((_lengths(batch) > 0).sum()),  # with any token
}


def register(name: str, count: Count) -> None:
    """Register a denominator under `name`, which must be new. For plugins."""
    assert name not in _COUNTS, name
    _COUNTS[name] = count


def require_denominator(term: Any, heads: Sequence[str]) -> None:
    """Raise ConfigError unless a term, perhaps a plugin's, names a denominator that exists.

    `heads` are those of its objective, whose targets have their names. Without a denominator the
    sum of the term would not be divided.
    """
    name = getattr(term, "denominator", "")
    if not (isinstance(name, WeightedLabels) or name in (known := [*_COUNTS, MASKED, *heads])):
        raise ConfigError(
            f"{type(term).__name__}.denominator: must be one of {', '.join(dict.fromkeys(known))}, "
            f"not {shown(name)}"
        )


class WeightedLabels(str):
    """The denominator of labels with weights: the sum of the weights of a target's labels.

    Its name holds target and weights. The labels are classes, or, if an example has several, right
    (1) or wrong (0), each with its own weight.
    """

    target: str
    weights: NDArray[Any]

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
    """Sums over all ranks that are known before a step's first forward pass, on the device.

    totals: the denominators in use; views: those in which tokens are counted; keys, values: all of
    the sums, float64 [keys], which represents integers exactly up to 2**53.

    The keys are the denominators in use; ("tokens", view): attended positions; positions: with
    padding; unreadable: sequences that could not be read; seconds: training time before the step,
    by rank 0's clock.
    """

    totals: Totals
    views: Sequence[str]
    keys: Sequence[Hashable]
    values: Tensor

    @classmethod
    def over_ranks(
        cls, batch: Batch, denominators: Set[InView], seconds: float, device: torch.device
    ) -> StepSums:
        """Sum these `denominators`, in one all-reduce. Collective."""
        in_use = sorted(denominators)
        views = sorted({DEFAULT_VIEW, *[view for view, _ in in_use]})
        counts: dict[Hashable, float] = {
            (view, name): count(name, batch.view(view)) for view, name in in_use
        }
        counts |= {("tokens", view): attended(batch.view(view)) for view in views}
        counts |= {
            "positions": batch.input_ids.size,
            "unreadable": 0 if batch.readable is None else int((~batch.readable).sum()),
            "seconds": seconds if dist.get_rank() == 0 else 0.0,
        }
        values = torch.tensor([*counts.values()], dtype=torch.float64)
        values = values.to(device, non_blocking=True)
        dist.all_reduce(values)
        divisors = values[: len(in_use)]  # the weights of labels may sum to less than 1
        divisors = torch.where(divisors > 0, divisors, 1.0).float()
        totals = dict(zip(in_use, divisors.unbind(), strict=True))
        return cls(totals, views, [*counts], values)
