"""Adamax and Adadelta of torch, with decoupled weight decay."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch

from configs.rules import PROBABILITY, Length, OneOf, positive
from trainer.optimizers.config import KIND, AdamConfig, register_optimizer
from trainer.optimizers.moments import with_gradient

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
        (_, rho), epsilon = self.moments
        return Adadelta(groups, self.learning_rate, rho, epsilon)


class _Decoupled(torch.optim.Optimizer):
    """Shrinks the parameters that have a gradient before each step: ``w *= 1 - lr * decay``."""

    def __init__(self, groups: Sequence[dict[str, Any]], *settings: Any) -> None:
        # A decay that torch does not add to the gradients.
        decoupled = ({**g, DECAY: g["weight_decay"], "weight_decay": 0.0} for g in groups)
        super().__init__([*decoupled], *settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            if group[DECAY] and (parameters := with_gradient(group)):
                torch._foreach_mul_(parameters, 1.0 - group["lr"] * group[DECAY])
        super().step(closure)


class Adamax(_Decoupled, torch.optim.Adamax):
    """Adamax of torch, decayed by itself."""


class Adadelta(_Decoupled, torch.optim.Adadelta):
    """Adadelta of torch, decayed by itself."""
