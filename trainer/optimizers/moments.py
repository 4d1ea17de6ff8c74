"""Adam's moments, and the base of optimizers that scale Adam's update of each parameter."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trainer.optimizers.shards import Tensorwise, parameter_sizes, parameter_views, squared_norms

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


class AdamSettings(torch.optim.Optimizer):
    """An optimizer with the settings of Adam."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        **others: Any,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, **others})


class ScaledAdam(AdamSettings, Tensorwise):
    """AdamW with a factor on the update of each parameter, without a host sync.

    scales_decay: whether the factor is on the weight decay too.
    """

    scales_decay: ClassVar[bool]

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
