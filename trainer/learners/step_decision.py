"""The decision whether a learner takes a step or skips it, and the counters that it updates."""

from __future__ import annotations

import math

from trainer.learner_config import LearnerConfig
from trainer.learners.state import LearnerState
from trainer.objectives import Objective
from trainer.optimizers.loss_scale import LossScale
from trainer.seeds import derive
from trainer.watch.guard import GRADIENT


def loss_scale(config: LearnerConfig, counters: LearnerState) -> LossScale:
    """The factor on the loss before the backward pass: 1 unless the precision is fp16."""
    if config.precision != "fp16":
        return LossScale(1.0)
    return counters.loss_scale or LossScale(config.loss_scale.initial)


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

    def record(self) -> None:
        """Count the step as taken, as a float16 overflow, or as skipped."""
        config, counters = self._config, self._counters
        scale = loss_scale(config, counters)
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
