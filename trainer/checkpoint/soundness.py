"""Whether a learner's weights are still sound, judged when they are saved.

A step can ruin weights although every loss so far was finite. Training from such a checkpoint gives
NaN. So a checkpoint records for each learner the norm of its weights, whether all values are
finite, and its newest held-out loss. It is *suspect* if, for any learner,

- a weight, a value of the optimizer's state or the held-out loss is not finite;
- the held-out loss is more than `LOSS_JUMP` nats above that of the last sound checkpoint;
- the norm per weight has changed by more than a factor of `NORM_JUMP` since the last sound
  checkpoint. This does not count if the learner was evaluated at this very step and its loss has
  not jumped, since norms may double early in training.

Everything is computed from the copy in host memory, in the writing thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.checkpoint.snapshot import MASTER, Snapshot

LOSS_JUMP = 0.5  # nats
NORM_JUMP = 2.0  # factor of the norm per weight, since a growing model has more weights
_CHUNK = 2**18  # values that are squared at a time


@dataclass(frozen=True)
class Portion:
    """Statistics of one rank's part of a learner."""

    squares: float  # sum of the squared weights
    weights: int  # number of weights
    finite: bool  # weights and optimizer states


@dataclass(frozen=True)
class Health:
    """The health of a learner in a checkpoint. Non-finite values are None."""

    finite: bool  # weights and optimizer states
    norm: float | None  # L2, over the weights on all ranks
    weights: int
    evaluated_at: int | None = None  # the step of its newest held-out loss; None before the first
    held_out: float | None = None  # that loss, nats


def measure(snapshot: Snapshot) -> Portion:
    """Compute the statistics of this rank's part of a learner."""
    squares, weights, finite = 0.0, 0, True
    for state, values in _numbers(snapshot):
        finite &= all(math.isfinite(end) for end in values.aminmax())
        if state == MASTER:
            squares, weights = squares + _squares(values), weights + values.numel()
    return Portion(squares, weights, finite)


def _squares(values: Tensor) -> float:
    """Their sum, in float64 without a copy of them all."""
    norms = (torch.linalg.vector_norm(part, dtype=torch.float64) for part in values.split(_CHUNK))
    return math.fsum(float(norm) ** 2 for norm in norms)


def _numbers(snapshot: Snapshot) -> Iterator[tuple[str, Tensor]]:
    """Each floating point fragment: its state and its values [numel]."""
    at = 0
    for fragment in snapshot.fragments:
        end = at + fragment.numel * fragment.dtype.itemsize
        if fragment.dtype.is_floating_point:
            yield fragment.state, snapshot.data[at:end].view(fragment.dtype)
        at = end


def health(portions: Sequence[Portion], evaluation: tuple[int, float] | None) -> Health:
    """A learner's health, from every rank's part and (step, loss) of its newest evaluation."""
    norm = math.sqrt(math.fsum(portion.squares for portion in portions))
    found = Health(
        finite=all(portion.finite for portion in portions),
        norm=norm if math.isfinite(norm) else None,
        weights=sum(portion.weights for portion in portions),
    )
    if evaluation is None:
        return found
    step, loss = evaluation
    return replace(found, evaluated_at=step, held_out=loss if math.isfinite(loss) else None)


def suspicion(step: int, now: Health, before: Health | None) -> str:
    """Why a learner at `step` is suspect; empty if it is sound.

    `before` is its health in the last sound checkpoint, if the learner is in it.
    """
    if not now.finite or now.norm is None:
        return "its weights or optimizer states are not finite"
    if now.evaluated_at is not None and now.held_out is None:
        return f"its held-out loss at step {now.evaluated_at} is not finite"
    if before is None:
        return ""
    if now.held_out is not None and before.held_out is not None:
        if now.held_out > before.held_out + LOSS_JUMP:
            return f"its held-out loss rose from {before.held_out:.3f} to {now.held_out:.3f}"
        if now.evaluated_at == step:
            return ""
    times = _per_weight(now) / (_per_weight(before) or math.inf)
    if 1 / NORM_JUMP <= times <= NORM_JUMP:
        return ""
    return f"the norm of its weights is {times:.3g} times that in the last sound checkpoint"


def _per_weight(one: Health) -> float:
    return (one.norm or 0.0) / math.sqrt(max(1, one.weights))


def with_older_evaluations(
    now: Mapping[str, Health], before: Mapping[str, Health]
) -> dict[str, Health]:
    """Give learners that have not been evaluated since a resume their evaluation from before."""
    return {
        name: one
        if one.evaluated_at is not None or name not in before
        else replace(one, evaluated_at=before[name].evaluated_at, held_out=before[name].held_out)
        for name, one in now.items()
    }


def suspicions(step: int, now: Mapping[str, Health], before: Mapping[str, Health]) -> str:
    """Why a checkpoint is suspect, with a reason per suspect learner; empty if it is sound."""
    found = {name: suspicion(step, one, before.get(name)) for name, one in now.items()}
    return "; ".join(f"{name}: {reason}" for name, reason in found.items() if reason)
