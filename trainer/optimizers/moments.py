"""Adam's moments, the same for every kind that has them, so that a run may switch kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

# After this many steps Adam's correction of its moments' bias is 1 to the last bit.
LATE = 1e9


def with_gradient(group: Mapping[str, Any]) -> list[Tensor]:
    """The parameters of a group that have a gradient."""
    return [p for p in group["params"] if p.grad is not None]


def advance(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Add 1 to the step count of a `parameter`, and create its moments, zeros, where missing.

    Returns the state. Its keys are those of torch's AdamW, which can continue from it.
    """
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    state["step"] += 1
    return state


def step_uncorrected(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    settings: Mapping[str, Any],
    lr: float,
    weight_decay: float,
) -> None:
    """One pass of torch's fused AdamW over the `parameters` and their moments, in place.

    `states` have the moments as in `advance`; `settings` have "betas" and "eps".
    """
    steps = torch.full((len(parameters),), LATE, device=parameters[0].device)
    adamw(
        list(parameters),
        list(gradients),
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        list(steps.unbind()),
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=settings["betas"][0],
        beta2=settings["betas"][1],
        lr=lr,
        weight_decay=weight_decay,
        eps=settings["eps"],
    )
