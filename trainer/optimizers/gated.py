"""An optimizer whose step can be skipped, and the loss scale of its gradients.

In float16, gradients below 6e-8 underflow to zero and those above 65504 overflow. The loss is
multiplied by a scale before the backward pass. The gradients, by then float32, are divided by it
before anything reads them. If they overflow nevertheless, the step is skipped and the scale is
halved; after many good steps in a row it is doubled (Micikevicius et al., arXiv 1710.03740).
Scales are powers of two, so that scaling does not round.

A learner's optimizer is stepped by its DeepSpeed engine, once or, at stages 1 to 3, once for each
parameter group. A learner with a bad loss or gradient must be skipped on all ranks at every stage
while DeepSpeed's own bookkeeping goes on, so that happens inside the optimizer. So does clipping.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from configs.kinds import require_returned
from configs.rules import COUNT, PowerOfTwo, Unit
from configs.section import Section
from trainer.checkpoint.snapshot import AVERAGE, elementwise
from trainer.errors import TrainingError
from trainer.optimizers.config import OptimizerConfig, Rates, parameter_groups
from trainer.optimizers.shards import Shards, Tensorwise, parameter_views, squared_norms

SMALLEST, LARGEST = 1.0, 2.0**24


@dataclass
class LossScaleConfig(Section):
    """The dynamic loss scale, for fp16."""

    initial: Annotated[float, PowerOfTwo(SMALLEST, LARGEST), "The first scale."] = 2.0**16
    growth_interval: Annotated[
        int,
        COUNT,
        Unit("steps in a row"),
        "After this many steps without overflow, the scale is doubled.",
    ] = 2000


@dataclass(frozen=True)
class LossScale:
    """A scale, and the number of steps in a row that did not overflow at it."""

    value: float
    good_steps: int = 0

    def after_step(self, growth_interval: int) -> LossScale:
        """The scale after a step that was taken."""
        if self.good_steps + 1 < growth_interval:
            return LossScale(self.value, self.good_steps + 1)
        return LossScale(min(2 * self.value, LARGEST))

    @property
    def can_shrink(self) -> bool:
        """Whether non-finite gradients may be due to the scale: at 1 they are not."""
        return self.value > SMALLEST

    def after_overflow(self) -> LossScale:
        """The scale after non-finite gradients."""
        return LossScale(self.value / 2)


def gradient_factor(norm: float, clipping: float, scale: float) -> float:
    """The factor of gradients that divides out their `scale` and clips them.

    `norm` is the norm of the gradient without the scale. A clipping of 0 means no clipping. The
    formula is the one of `torch.nn.utils.clip_grad_norm_`.
    """
    clip = min(1.0, clipping / (norm + 1e-6)) if clipping else 1.0
    return clip / scale


class GatedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer, whose parameter groups and state it shares, and may skip its steps.

    Gradients are multiplied by `gradient_factor` before each step; None skips the step. Groups
    whose learning rate is 0 stay untouched: their moments do not advance either. `mean_kept` is
    the part of the weights' means that stays in a step (`AverageConfig`), also at a rate of 0;
    None: there are no means.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.state = inner, inner.state
        self.gradient_factor: float | None = 1.0
        self.mean_kept: float | None = None
        self.clipping = 0.0  # the largest norm of each parameter's gradient by itself; 0: any
        self._shards: Shards | None = None
        self._forgets = False

    @property
    def needs_shards(self) -> bool:
        """Whether it reads norms of whole parameters, of which ZeRO gives it parts."""
        return self.clipping > 0 or isinstance(self.inner, Tensorwise)

    def use(self, shards: Shards) -> None:
        """Read norms of whole parameters by these `shards`."""
        self._shards = shards
        if isinstance(self.inner, Tensorwise):
            self.inner.shards = shards

    def forget(self) -> None:
        """Drop all moments and step counts at the next step, even if that is skipped.

        Not earlier, since a checkpoint may just be copied (`trainer.checkpoint.snapshot`). Every
        rank must call it.
        """
        self._forgets = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of the groups that learn, or none at all when the step is skipped."""
        if self._forgets:
            self._reset()
        if self.gradient_factor is None:
            return
        # DeepSpeed puts groups in and out of `param_groups` between its steps.
        self.inner.param_groups = [group for group in self.param_groups if group["lr"]]
        parameters = [p for group in self.inner.param_groups for p in group["params"]]
        means = [] if self.mean_kept is None else self._take_means(parameters)
        begun = [
            (parameter, group["states"])
            for group in self.inner.param_groups
            if "states" in group
            for parameter in group["params"]
            if not self.state.get(parameter)
        ]
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients and self.gradient_factor != 1.0:
            torch._foreach_mul_(gradients, self.gradient_factor)
        if gradients and self.clipping:
            self._clip_each([p for p in parameters if p.grad is not None], gradients)
        self.inner.step(closure)
        if begun:
            self._require_states(begun)
        if self.mean_kept is not None:
            self._put_means(parameters, means, self.mean_kept)

    def _take_means(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Take the means of `parameters` out of their states, which are the inner optimizer's."""
        return [self.state[p].pop(AVERAGE, None) if p in self.state else None for p in parameters]

    def _put_means(
        self, parameters: Sequence[Tensor], means: Sequence[Tensor | None], kept: float
    ) -> None:
        """Put them back, and move all means, also at rate 0, towards what they are the means of.

        A missing one begins as its parameter. With a `kept` of 1 they stay as they are.
        """
        for parameter, mean in zip(parameters, means, strict=True):
            if mean is not None or kept < 1:
                mean = parameter.detach().clone() if mean is None else mean
                self.state[parameter][AVERAGE] = mean
        every = (parameter for group in self.param_groups for parameter in group["params"])
        averaged = [parameter for parameter in every if AVERAGE in self.state.get(parameter, {})]
        if kept < 1 and averaged:
            current = [self.state[parameter][AVERAGE] for parameter in averaged]
            torch._foreach_lerp_(current, averaged, weight=1 - kept)

    def _clip_each(self, holders: list[Tensor], gradients: list[Tensor]) -> None:
        """Clip each parameter's gradient as `torch.nn.utils.clip_grad_norm_` does. Collective."""
        gradients = parameter_views(self._shards, holders, gradients)
        squares = squared_norms(gradients)
        if self._shards is not None:
            squares = self._shards.sum(holders, squares)
        factors = (self.clipping / (squares.sqrt() + 1e-6)).clamp(max=1.0).float()
        torch._foreach_mul_(gradients, list(factors.unbind()))

    def _require_states(self, begun: Sequence[tuple[Tensor, Sequence[str]]]) -> None:
        """Raise TrainingError where states are not those that the config names.

        A run that resumes would take them for those of another kind (`resumed_states`).
        """
        for parameter, names in begun:
            state = self.state.get(parameter, {})
            kept = {name for name in state if elementwise(name, state[name], parameter)}
            if state and kept != {*names}:
                raise TrainingError(
                    f"{type(self.inner).__name__}: keeps {_listed(kept)} for each parameter, and "
                    f"`states` of its config names {_listed(names)}; correct `states`"
                )

    def _reset(self) -> None:
        self._forgets = False
        for parameter, state in self.state.items():
            self.state[parameter] = {name: state[name] for name in state if name == AVERAGE}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


class MasterOptimizer(GatedOptimizer):
    """Steps float32 masters of 16-bit weights at stage 0, and rounds these to the parameters.

    At the other stages masters are DeepSpeed's partitions. Its own optimizer of stage 0 adds
    gradients up in 16 bit, and has the host wait for the device.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.masters: dict[nn.Parameter, Tensor] = {}  # in the order of the groups

    def keep_masters(self) -> None:
        """Replace every parameter of the groups by a float32 copy.

        Call it once the parameters are on their device.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                self.masters[parameter] = parameter.detach().float()
            group["params"] = [self.masters[parameter] for parameter in group["params"]]

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Add the parameters' gradients to those of their masters, and drop them.

        Call it after each backward pass, since gradients of several add up in float32.
        """
        gradients = {p: p.grad for p in self.masters if p.grad is not None}
        if not gradients:
            return
        taken = [torch.empty_like(self.masters[parameter]) for parameter in gradients]
        torch._foreach_copy_(taken, [*gradients.values()])
        for parameter, gradient in zip(gradients, taken, strict=True):
            master, parameter.grad = self.masters[parameter], None
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    def get_grads_for_reduction(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """The gradients that DeepSpeed averages over the ranks; those of experts, which are none.

        Where there is no gradient it is one of zeros, so that all ranks have as many.
        """
        self.take_gradients()
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [m.grad for m in self.masters.values() if m.grad is not None], {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of the masters and the parameters, or none when the step is skipped."""
        self.take_gradients()
        super().step(closure)
        self.round_masters()
        for master in self.masters.values():
            master.grad = None

    @torch.no_grad()
    def round_masters(self) -> None:
        """Set the parameters to their masters, rounded."""
        torch._foreach_copy_(list(self.masters), list(self.masters.values()))


def build_optimizer(
    module: nn.Module, config: OptimizerConfig, rates: Rates, *, masters: bool = False
) -> GatedOptimizer:
    """The optimizer of `module`, before DeepSpeed partitions its parameters.

    With `masters`, one that can keep masters itself (`MasterOptimizer`).
    """
    wrapper = MasterOptimizer if masters else GatedOptimizer
    built = config.build(parameter_groups(module, config, rates))
    name = f"{type(config).__name__}.build"
    return wrapper(require_returned(built, torch.optim.Optimizer, name))
