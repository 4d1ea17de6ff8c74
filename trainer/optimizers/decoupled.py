"""Adamax and Adadelta of torch, with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

DECAY = "decoupled_weight_decay"


class Adamax(torch.optim.Adamax):
    """Adamax (Kingma and Ba, arXiv 1412.6980, section 7.1), decayed as in MT-DNN's code."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(_decoupled(groups), lr, betas, eps)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        _decay(self.param_groups)
        super().step(closure)


class Adadelta(torch.optim.Adadelta):
    """Adadelta (Zeiler, arXiv 1212.5701); the second of the `betas` is its only decay rate."""

    def __init__(
        self, groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(_decoupled(groups), lr, betas[1], eps)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        _decay(self.param_groups)
        super().step(closure)


def _decoupled(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups, with a decay that torch does not add to their gradients."""
    return [{**group, DECAY: group["weight_decay"], "weight_decay": 0.0} for group in groups]


def _decay(groups: Sequence[dict[str, Any]]) -> None:
    """Shrink the parameters that have a gradient: ``w *= 1 - lr * decay``."""
    for group in groups:
        parameters = [p for p in group["params"] if p.grad is not None]
        if group[DECAY] and parameters:
            torch._foreach_mul_(parameters, 1.0 - group["lr"] * group[DECAY])
