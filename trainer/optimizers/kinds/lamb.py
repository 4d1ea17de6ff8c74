"""LAMB with one trust ratio per parameter, however ZeRO partitions the parameter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from configs.rules import OneOf, positive
from trainer.optimizers.config import KIND, AdamConfig, register_optimizer
from trainer.optimizers.moments import AdamSettings, advance, step_uncorrected, with_gradient
from trainer.optimizers.shards import Tensorwise, parameter_views, squared_norms


@register_optimizer
@dataclass
class LambConfig(AdamConfig):
    """LAMB (You et al., arXiv 1904.00962) as in ALBERT's code, without bias correction.

    A trust ratio for each matrix scales its step.
    """

    kind: Annotated[str, OneOf("lamb"), KIND] = "lamb"
    epsilon: Annotated[float, positive(1.0), "Added to the square root of the second moment."] = (
        1e-6
    )

    def build(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return Lamb(groups, self.learning_rate, *self.moments)


class _Trained(NamedTuple):
    """The parameters of a group that have gradients, and the updates to subtract, negated."""

    settings: dict[str, Any]
    parameters: list[Tensor]
    updates: list[Tensor]


class Lamb(AdamSettings, Tensorwise):
    """LAMB (You et al., arXiv 1904.00962, algorithm 2, in the form of ALBERT's code).

    ``u = m / (sqrt(v) + eps) + decay * w`` and ``w -= lr * |w| / |u| * u``, where m and v are not
    corrected for bias. The trust ratio |w| / |u| is 1 where either norm is 0 and in groups that are
    not `adaptive`. The norms are those of whole parameters.
    """

    def __init__(self, *settings: Any, **named: Any) -> None:
        super().__init__(*settings, adaptive=True, **named)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. Collective under ZeRO."""
        trained = [self._trained(group) for group in self.param_groups if with_gradient(group)]
        self._step_adaptive([group for group in trained if group.settings["adaptive"]])
        for settings, parameters, updates in trained:
            if not settings["adaptive"]:
                torch._foreach_add_(parameters, updates, alpha=settings["lr"])

    def _trained(self, settings: dict[str, Any]) -> _Trained:
        """Advance the moments of a group; they and the updates take one pass by a fused kernel.

        It subtracts ``m / (sqrt(v) + eps)`` from zeros.
        """
        parameters = with_gradient(settings)
        gradients = [p.grad for p in parameters if p.grad is not None]
        states = [advance(self.state[parameter], parameter) for parameter in parameters]
        updates = [torch.zeros_like(parameter) for parameter in parameters]
        step_uncorrected(updates, gradients, states, settings, lr=1.0, weight_decay=0.0)
        if settings["weight_decay"]:
            torch._foreach_add_(updates, parameters, alpha=-settings["weight_decay"])
        return _Trained(settings, parameters, updates)

    def _step_adaptive(self, groups: list[_Trained]) -> None:
        """Update parameters by their trust ratios, without a host sync."""
        if not groups:
            return
        holders = [p for group in groups for p in group.parameters]
        weights = parameter_views(self.shards, holders, holders)
        updates = parameter_views(
            self.shards, holders, [u for group in groups for u in group.updates]
        )
        squares = squared_norms([*weights, *updates]).view(2, -1)  # [2, parameters]
        if self.shards is not None:
            squares = self.shards.sum(holders, squares)
        weight_norms, update_norms = squares.sqrt().unbind()
        defined = (weight_norms > 0) & (update_norms > 0)
        ratios = torch.where(defined, weight_norms / update_norms, 1.0).float().unbind()
        rates = [
            group.settings["lr"]
            for group in groups
            for _ in parameter_views(self.shards, group.parameters, group.parameters)
        ]
        for weight, update, ratio, rate in zip(weights, updates, ratios, rates, strict=True):
            weight.addcmul_(update, ratio, value=rate)
