"""Adam whose update of each parameter is scaled by a statistic of the whole parameter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from trainer.optimizers.moments import adam_updates, with_gradient
from trainer.optimizers.norms import squared_norms
from trainer.optimizers.shards import Tensorwise, parameter_sizes, parameter_views


class ScaledAdam(Tensorwise):
    """AdamW with a factor on the update of each parameter, without a host sync.

    scales_decay: whether the factor is on the weight decay too.
    """

    scales_decay: ClassVar[bool]

    def __init__(
        self, params: Iterable[Any], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @abstractmethod
    def measure(
        self, update: Tensor, gradient: Tensor, state: Mapping[str, Tensor], group: dict[str, Any]
    ) -> Tensor:
        """A number for each element, whose mean square is read. It may change the `update`."""

    @abstractmethod
    def factors(self, mean_squares: Tensor) -> Tensor:
        """The factor of each parameter, [parameters], from what was measured of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. Collective under ZeRO."""
        holders: list[Tensor] = []
        updates: list[Tensor] = []
        measured: list[Tensor] = []
        rates: list[float] = []
        for group in self.param_groups:
            parameters = with_gradient(group)
            changes = adam_updates(self.state, group, parameters)
            for parameter, update in zip(parameters, changes, strict=True):
                assert parameter.grad is not None
                state = self.state[parameter]
                measured.append(self.measure(update, parameter.grad, state, group))
                if self.scales_decay:
                    update.sub_(parameter, alpha=group["weight_decay"])
                else:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
            holders += parameters
            updates += changes
            rates += [group["lr"]] * len(parameter_views(self.shards, parameters, parameters))
        if holders:
            factors = self.factors(self._mean_squares(holders, measured))
            self._apply(holders, updates, rates, factors)

    def _mean_squares(self, holders: list[Tensor], measured: list[Tensor]) -> Tensor:
        squares = squared_norms(parameter_views(self.shards, holders, measured))
        if self.shards is not None:
            squares = self.shards.sum(holders, squares)
        sizes = parameter_sizes(self.shards, holders)
        return torch.stack(torch._foreach_div(list(squares.unbind()), sizes))

    def _apply(
        self, holders: list[Tensor], updates: list[Tensor], rates: list[float], factors: Tensor
    ) -> None:
        weights = parameter_views(self.shards, holders, holders)
        changes = parameter_views(self.shards, holders, updates)
        each = zip(weights, changes, factors.float().unbind(), rates, strict=True)
        for weight, change, factor, rate in each:
            weight.addcmul_(change, factor, value=rate)
