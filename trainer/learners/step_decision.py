"""The decision whether a learner takes a step or skips it, and the norm of its gradient.

DeepSpeed's own norms take a collective for each parameter group, and the host waits for each. Here
every rank computes its part on the device, and the step adds up the parts of all learners at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.learner_config import LearnerConfig
from trainer.learner_names import derive
from trainer.learners.state import LearnerState
from trainer.objectives import Objective
from trainer.optimizers.gated import LossScale
from trainer.optimizers.shards import squared_norm
from trainer.watch.guard import GRADIENT

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def fill_gradients(engine: DeepSpeedEngine) -> list[Tensor]:
    """The gradients that the optimizer reads at stage 0: of the parameters, or of their masters.

    A parameter without a gradient gets one of zeros, as DeepSpeed does at the other stages, and on
    several ranks.
    """
    stepped = [tensor for group in engine.optimizer.param_groups for tensor in group["params"]]
    for parameter in stepped:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [parameter.grad for parameter in stepped]


def squared_norm_part(engine: DeepSpeedEngine) -> Tensor:
    """This rank's part of the squared L2 norm of the gradient: float64 [], on the device.

    The sum over the ranks is the squared norm of the whole gradient, as the step's backward passes
    left it.
    """
    stage, wrapper = engine.zero_optimization_stage(), engine.optimizer
    if stage == 0:
        gradients = fill_gradients(engine)  # equal on all ranks: one counts
        return squared_norm(gradients if dist.get_rank() == 0 else [], engine.device)
    if _is_offloaded(engine):  # DeepSpeed took them on the way to the host
        norms = list(wrapper.norm_for_param_grads.values())
        none = torch.zeros((), dtype=torch.float64, device=engine.device)
        return torch.stack(norms).double().square().sum() if norms else none
    groups = wrapper.averaged_gradients.values()
    return squared_norm([part for group in groups for part in group], engine.device)


def _is_offloaded(engine: DeepSpeedEngine) -> bool:
    wrapper = engine.optimizer
    offloaded = "offload_optimizer" if engine.zero_optimization_stage() == 3 else "cpu_offload"
    return bool(getattr(wrapper, offloaded))


def gradient_factor(norm: float, clipping: float, scale: float) -> float:
    """The factor of gradients that divides out their `scale` and clips them.

    `norm` is the norm of the gradient without the scale. A clipping of 0 means no clipping. The
    formula is the one of `torch.nn.utils.clip_grad_norm_`.
    """
    clip = min(1.0, clipping / (norm + 1e-6)) if clipping else 1.0
    return clip / scale


def regime(
    config: LearnerConfig, objective: Objective, own_step: int, conditions: tuple[object, ...]
) -> str:
    """A key of the facts that comparable losses share: terms, dropout, and these `conditions`.

    A weight or temperature that reaches the next segment of its schedule may make the loss jump,
    so the segments are part of the key.
    """
    weights = objective.weights(own_step)
    terms = {n: t.segments(own_step) for n, t in objective.by_name.items() if weights[n]}
    captures = objective.student_capture(own_step), objective.source_capture(own_step)
    shared = config.objective, config.dropout, terms, captures, conditions
    return f"{derive(repr(shared)):x}"


class StepDecision:
    """One learner's decision about one step. It follows from global values: all ranks agree."""

    def __init__(
        self,
        config: LearnerConfig,
        counters: LearnerState,
        loss: float,
        regime: str,
        task: str,
        gradient_norm: float,
    ) -> None:
        """`gradient_norm` is that of the gradient before clipping."""
        self._config, self._counters, self._loss, self._task = config, counters, loss, task
        self._is_idle = gradient_norm == 0.0
        self.skipped = counters.guard.judge(config.guard, loss, regime, task)  # the reason, if any
        self.is_taken = self.skipped is None and math.isfinite(gradient_norm)

    def record(self, scale: LossScale) -> None:
        """Count the step, whose loss had this `scale`: taken, a float16 overflow, or skipped."""
        config, counters = self._config, self._counters
        if self.is_taken:
            counters.guard.record_step(config.guard, self._loss, self._task)
            counters.idle_steps += self._is_idle
            if config.precision == "fp16":
                counters.loss_scale = scale.after_step(config.loss_scale.growth_interval)
        elif self.skipped is None and scale.can_shrink:
            counters.overflows += 1
            counters.loss_scale = scale.after_overflow()
        else:
            self.skipped = self.skipped or GRADIENT
            counters.guard.record_skip(self.skipped)
