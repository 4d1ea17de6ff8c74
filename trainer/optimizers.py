"""Optimizers, and the rule for which parameters decay.

A learner's optimizer is stepped by its DeepSpeed engine. `SkippableAdamW` can be told to let a
step pass without touching weights or moments, which is how a learner with a non-finite loss or
gradient sits out on all ranks at every ZeRO stage: DeepSpeed's own bookkeeping goes on as usual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    learning_rate: float = 1e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    epsilon: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        """Refuse values AdamW is not defined for."""
        if self.learning_rate <= 0:
            raise ValueError("learning_rate must be positive")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError("betas must be two numbers from 0 up to 1")


class SkippableAdamW(torch.optim.AdamW):
    """AdamW that asks `permitted`, once set, before each step."""

    permitted: Callable[[], bool] | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update, or none at all when it is not permitted."""
        if self.permitted is None or self.permitted():
            super().step(closure)


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; biases and norm parameters (one dimension) do not, as in BERT."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> SkippableAdamW:
    """The optimizer of `module`, before DeepSpeed partitions its parameters."""
    return SkippableAdamW(
        parameter_groups(module, config.weight_decay),
        lr=config.learning_rate,
        betas=(config.betas[0], config.betas[1]),
        eps=config.epsilon,
    )
