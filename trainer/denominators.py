"""Denominators of the losses: counts of a batch that are known before its first forward pass.

A denominator is a pure function of a rank's rows of the global batch, with a name by which terms
declare it. A name that is not registered is a target's: the count of its labels. One all-reduce
sums those in use over the ranks, along with the step's other counts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline import DEFAULT_VIEW, MASKED, Batch

ATTENDED, ATTENDED_PAIRS, ROWS = "attended", "attended_pairs", "rows"
Count = Callable[[Batch], int]
Totals = Mapping[str, Tensor]  # denominator -> its count over all ranks, at least 1, float32
Key = TypeVar("Key", bound=Hashable)


def labelled(target: str) -> Count:
    """The number of labels of a target; 0 for a batch without it."""
    return lambda batch: (
        int(batch.targets[target].is_labelled.sum()) if target in batch.targets else 0
    )


def attended(batch: Batch) -> int:
    """Positions that are not padding."""
    return int(_lengths(batch).sum())


def _masked(batch: Batch) -> int:
    """Positions with a masked-LM label, including those that are yet to be chosen."""
    return labelled(MASKED)(batch) if batch.to_mask is None else int(batch.to_mask.sum())


def _lengths(batch: Batch) -> np.ndarray:
    lengths: np.ndarray = batch.attention_mask.astype(np.int64).sum(axis=-1)  # of each sequence
    return lengths


_COUNTS: dict[str, Count] = {
    MASKED: _masked,
    ATTENDED: attended,
    ATTENDED_PAIRS: lambda batch: int((_lengths(batch) ** 2).sum()),  # in one row
    ROWS: lambda batch: int((_lengths(batch) > 0).sum()),  # with any token
}


def register(name: str, count: Count) -> None:
    """Register a denominator under `name`, which must be new. For plugins."""
    assert name not in _COUNTS, name
    _COUNTS[name] = count


def count(name: str, batch: Batch) -> int:
    """A denominator's count of these rows."""
    return _COUNTS.get(name, labelled(name))(batch)


@dataclass(frozen=True)
class StepSums:
    """Sums over all ranks that are known before a step's first forward pass. Scalars on the device.

    tokens: attended positions by view; positions: with padding; unreadable: sequences that could
    not be read; seconds: training time before the step, by rank 0's clock; all float64.
    """

    totals: Mapping[str, Totals]  # view -> its denominators
    tokens: Mapping[str, Tensor]
    positions: Tensor
    unreadable: Tensor
    seconds: Tensor

    @classmethod
    def over_ranks(
        cls,
        batch: Batch,
        denominators: Iterable[tuple[str, str]],
        seconds: float,
        device: torch.device,
    ) -> StepSums:
        """Sum the `denominators` (view, name) in use, in one all-reduce. Collective."""
        in_use = sorted(set(denominators))
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
        totals: dict[str, dict[str, Tensor]] = {view: {} for view, _ in in_use}
        for view, name in in_use:
            totals[view][name] = sums[view, name].clamp(min=1).float()
        tokens = {view: sums["tokens", view] for view in views}
        return cls(totals, tokens, sums["positions"], sums["unreadable"], sums["seconds"])

    def stacked(self) -> Tensor:
        """Positions, unreadable sequences, seconds, then the tokens of each view: float64."""
        return torch.stack([self.positions, self.unreadable, self.seconds, *self.tokens.values()])


def sum_over_ranks(values: Mapping[Key, float], device: torch.device) -> dict[Key, Tensor]:
    """Each value summed over the ranks, as float64 scalars. All ranks pass equal keys. Collective.

    float64 represents integers exactly up to 2**53.
    """
    summed = torch.tensor(list(values.values()), dtype=torch.float64)
    summed = summed.to(device, non_blocking=True)
    dist.all_reduce(summed)
    return dict(zip(values, summed.unbind(), strict=True))
