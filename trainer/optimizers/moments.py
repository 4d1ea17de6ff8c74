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


def adam_updates(
    states: Mapping[Tensor, dict[str, Any]],
    settings: Mapping[str, Any],
    parameters: Sequence[Tensor],
) -> list[Tensor]:
    """Advance the moments of `parameters`; returns ``-m / (sqrt(v) + eps)``, corrected for bias.

    A fused kernel subtracts it from zeros.
    """
    if not parameters:
        return []
    gradients = [p.grad for p in parameters if p.grad is not None]
    moments = [advance(states[parameter], parameter) for parameter in parameters]
    updates = [torch.zeros_like(parameter) for parameter in parameters]
    steps = [float(state["step"]) for state in moments]
    fused_adamw(updates, gradients, moments, settings, steps, lr=1.0, weight_decay=0.0)
    return updates


def step_uncorrected(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    settings: Mapping[str, Any],
    lr: float,
    weight_decay: float,
) -> None:
    """`fused_adamw` without correction of the moments' bias."""
    steps = [LATE] * len(parameters)
    fused_adamw(parameters, gradients, states, settings, steps, lr, weight_decay)


def fused_adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    settings: Mapping[str, Any],
    steps: Sequence[float],
    lr: float,
    weight_decay: float,
) -> None:
    """One pass of torch's fused AdamW over the `parameters` and their moments, in place.

    `states` have the moments as in `advance`; `settings` have "betas" and "eps"; `steps` are those
    by which the moments are corrected, of each parameter.
    """
    # The kernel adds 1.
    counts = torch.full((len(parameters),), steps[0] - 1, device=parameters[0].device)
    for number, step in enumerate(steps):
        if step != steps[0]:
            counts[number].fill_(step - 1)
    adamw(
        list(parameters),
        list(gradients),
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        list(counts.unbind()),
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=settings["betas"][0],
        beta2=settings["betas"][1],
        lr=lr,
        weight_decay=weight_decay,
        eps=settings["eps"],
    )
