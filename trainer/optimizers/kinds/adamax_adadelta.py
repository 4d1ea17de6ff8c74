"""Adamax and Adadelta of torch, with decoupled weight decay."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch

from configs.rules import PROBABILITY, Length, OneOf, positive
from trainer.optimizers.config import KIND, AdamConfig, register_optimizer

DECAY = "decoupled_weight_decay"


@register_optimizer
@dataclass
class AdamaxConfig(AdamConfig):
    """Adamax (Kingma and Ba, arXiv 1412.6980, section 7.1), decayed as in MT-DNN's code.

    It corrects the bias of its first moment.
    """

    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_inf")

    kind: Annotated[str, OneOf("adamax"), KIND] = "adamax"
    betas: Annotated[
        list[float],
        Length(2),
        PROBABILITY,
        "Decay rates of the first moment and of the largest gradient, per step.",
    ] = field(default_factory=lambda: [0.9, 0.999])
    epsilon: Annotated[float, positive(1.0), "Added to the size of a gradient."] = 1e-8

    def build(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return Adamax(groups, self.learning_rate, *self.moments)


@register_optimizer
@dataclass
class AdadeltaConfig(AdamConfig):
    """Adadelta (Zeiler, arXiv 1212.5701), with decoupled weight decay."""

    states: ClassVar[tuple[str, ...]] = ("square_avg", "acc_delta")

    kind: Annotated[str, OneOf("adadelta"), KIND] = "adadelta"
    betas: Annotated[
        list[float],
        Length(2),
        PROBABILITY,
        "The second is the decay rate of both averages, per step; the first is not used.",
    ] = field(default_factory=lambda: [0.9, 0.999])
    epsilon: Annotated[float, positive(1.0), "Added below both square roots."] = 1e-6

    def build(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return Adadelta(groups, self.learning_rate, *self.moments)


class Adamax(torch.optim.Adamax):
    """Adamax of torch, decayed by itself."""

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
    """Adadelta of torch, decayed by itself; the second of the `betas` is its only decay rate."""

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
