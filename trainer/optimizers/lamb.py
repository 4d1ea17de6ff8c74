"""LAMB with one trust ratio per parameter, however ZeRO partitions the parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.optimizers.moments import advance
from trainer.optimizers.norms import squared_norms
from trainer.optimizers.shards import Shards


class _Trained(NamedTuple):
    """The parameters of a group that have gradients. The updates overwrite the gradients."""

    settings: dict[str, Any]
    parameters: list[Tensor]
    gradients: list[Tensor]


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al., arXiv 1904.00962, algorithm 2, in the form of ALBERT's code).

    ``u = m / (sqrt(v) + eps) + decay * w`` and ``w -= lr * |w| / |u| * u``, where m and v are not
    corrected for bias. The trust ratio |w| / |u| is 1 where either norm is 0 and in groups that are
    not `adaptive`. The norms are those of whole parameters: without `shards` each tensor is one,
    with `shards` they say which parts of the tensors make up a parameter. A step overwrites the
    gradients.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "adaptive": True})
        self.shards: Shards | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. Collective under ZeRO."""
        trained = [group for group in map(_trained, self.param_groups) if group.parameters]
        for group in trained:
            self._turn_gradients_into_updates(group)
        self._scale_updates([group for group in trained if group.settings["adaptive"]])
        for settings, parameters, updates in trained:
            torch._foreach_add_(parameters, updates, alpha=-settings["lr"])

    def _turn_gradients_into_updates(self, group: _Trained) -> None:
        """In place, to save the memory of another tensor for every gradient."""
        settings, parameters, gradients = group
        states = [advance(self.state[parameter], parameter) for parameter in parameters]
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        beta1, beta2 = settings["betas"]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
        torch._foreach_copy_(gradients, squares)
        torch._foreach_sqrt_(gradients)
        torch._foreach_add_(gradients, settings["eps"])
        torch._foreach_reciprocal_(gradients)
        torch._foreach_mul_(gradients, means)
        if settings["weight_decay"]:
            torch._foreach_add_(gradients, parameters, alpha=settings["weight_decay"])

    def _scale_updates(self, groups: list[_Trained]) -> None:
        """Multiply the updates by their trust ratios, without a host sync."""
        if not groups:
            return
        parameters = [p for group in groups for p in group.parameters]
        gradients = [g for group in groups for g in group.gradients]
        weights = self._whole(parameters, parameters)
        updates = self._whole(parameters, gradients)
        squares = squared_norms([*weights, *updates]).view(2, -1)  # [2, parameters]
        if self.shards is not None:
            squares = self.shards.sum(parameters, squares)
        weight_norms, update_norms = squares.sqrt().unbind()
        defined = (weight_norms > 0) & (update_norms > 0)
        ratios = torch.where(defined, weight_norms / update_norms, 1.0).float()
        torch._foreach_mul_(updates, list(ratios.unbind()))

    def _whole(self, parameters: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
        """Views of `tensors`, which are shaped like `parameters`, one view per model parameter."""
        if self.shards is None:
            return tensors
        pairs = zip(parameters, tensors, strict=True)
        return [view for p, tensor in pairs for view in self.shards.cut(p, tensor)]


def _trained(group: dict[str, Any]) -> _Trained:
    pairs = [(p, p.grad) for p in group["params"] if p.grad is not None]
    return _Trained(group, [p for p, _ in pairs], [gradient for _, gradient in pairs])
