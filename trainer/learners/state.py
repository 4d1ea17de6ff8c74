"""The progress of a job, and what follows from it: when a student joins and is done.

Dropout, masks, order and learning rates are pure functions of the step and need no state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.checkpoint.folder import Ranking
from trainer.learner_config import LearnerConfig
from trainer.learner_life import BudgetConfig, StartConfig
from trainer.optimizers.gated import LossScale
from trainer.scoring.scores import with_leads
from trainer.watch.guard import GRADIENT, Guard


@dataclass
class BestScore:
    """A learner's best held-out score so far, by its primary metric."""

    metric: str
    value: float
    step: int  # of the job, at which it was measured
    evaluations: int = 0  # since then


@dataclass
class LearnerState:
    """A learner's own counters."""

    started_at: int
    tokens: int = 0  # trained on so far
    finished_at: int | None = None  # the job's step at which its own budget was used up
    finished_after: float | None = None  # the job's training time in seconds at that step
    guard: Guard = field(default_factory=Guard)
    loss_scale: LossScale | None = None  # fp16 only, from the first step on
    overflows: int = 0  # steps that only lowered the loss scale
    given_heads: list[str] = field(default_factory=list)  # heads that its initial weights contained
    lead: float = 0.0  # a student's: how much lower its teacher's loss is, a running mean
    clocked_from: float | None = None  # the job's training time in seconds when its schedule began
    best: BestScore | None = None
    idle_steps: int = 0  # taken with a gradient of zero, as where no example has a label

    def finish(self, step: int, seconds: float) -> None:
        """Note that its own budget is used up after `step` steps of the job, in `seconds`."""
        self.finished_at, self.finished_after = step, seconds

    def record_step(
        self, config: LearnerConfig, loss: float, task: str, norm: float, scale: LossScale
    ) -> None:
        """Count a step that was taken, with a gradient of this `norm` at a `scale` of the loss."""
        self.guard.record_step(config.guard, loss, task)
        self.idle_steps += norm == 0.0
        if config.precision == "fp16":
            self.loss_scale = scale.after_step(config.loss_scale.growth_interval)

    def record_skip(self, reason: str | None, scale: LossScale) -> str | None:
        """Count a step that was skipped; returns why. None: a float16 overflow at this `scale`.

        `reason` is the guard's; without one, the gradient was not finite.
        """
        if reason is None and scale.can_shrink:
            self.overflows += 1
            self.loss_scale = scale.after_overflow()
            return None
        self.guard.record_skip(reason or GRADIENT)
        return reason or GRADIENT

    def record_score(self, ranking: Ranking, score: float, step: int) -> None:
        """Note the score of a held-out evaluation after `step` steps of the job."""
        best = self.best
        if best is None or best.metric != ranking.metric or ranking.is_better(score, best.value):
            self.best = BestScore(ranking.metric, score, step)
        else:
            best.evaluations += 1

    @property
    def is_skipping(self) -> bool:
        """Whether it has skipped its last step and may skip the next one. False once it is done."""
        return self.finished_at is None and self.guard.in_a_row > 0

    @property
    def skipped_steps(self) -> int:
        """Steps of the job that it skipped."""
        return sum(self.guard.skipped.values())

    def steps_made(self, step: int) -> int:
        """How many of its own steps it has made by the job's `step`, skipped ones included."""
        last = step if self.finished_at is None else self.finished_at
        return last - self.started_at

    def steps_taken(self, step: int) -> int:
        """How often its weights have changed by the job's `step`."""
        return self.steps_made(step) - self.skipped_steps - self.overflows

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> LearnerState:
        """The state that plain data describe."""
        scale = LossScale(**tree["loss_scale"]) if tree["loss_scale"] else None
        best = BestScore(**tree["best"]) if tree.get("best") else None
        return cls(**{**tree, "guard": Guard(**tree["guard"]), "loss_scale": scale, "best": best})


@dataclass
class JobState:
    """A job after `step` steps. JSON in `trainer.json`."""

    wandb_id: str
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    learners: dict[str, LearnerState] = field(default_factory=dict)
    teacher_layers: int = 0  # which may grow; 0 before there is a teacher
    rolled_back: list[dict[str, Any]] = field(default_factory=list)  # entries of `rollback` applied
    # The teacher's most recent evaluation, by column: trained heads only.
    teacher_held_out: dict[str, float] | None = None
    # Each learner's own steps and held-out loss in nats, at every evaluation so far.
    held_out: dict[str, list[list[float]]] = field(default_factory=dict)
    unreadable: int = 0  # sequences that could not be read
    corpora: dict[str, str] = field(default_factory=dict)  # see `data_pipeline.contents`
    is_regular: bool = True  # whether its checkpoint may count in averages (`CheckpointAverage`)
    rows: int | None = None  # of metrics.jsonl so far; None in old checkpoints
    config: str = ""  # the job's, resolved, as YAML

    def to_json(self) -> dict[str, Any]:
        """Plain data, for the checkpoint."""
        curves = {name: [*curve] for name, curve in self.held_out.items()}  # asdict is slow on them
        return {**dataclasses.asdict(dataclasses.replace(self, held_out={})), "held_out": curves}

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> JobState:
        """The inverse of `to_json`."""
        learners = {
            name: LearnerState.from_json(counters) for name, counters in tree["learners"].items()
        }
        return cls(**{**tree, "learners": learners})


HOUR = 3600.0


def is_due(start: StartConfig, state: JobState, unigram: Mapping[str, float], primary: str) -> bool:
    """Whether a student with this `start` joins before step `state.step`.

    `primary` is the metric of a threshold that names none; `unigram` holds the baseline's scores.
    """
    threshold = start.teacher
    if state.step < start.step or threshold is None:
        return state.step >= start.step
    score = with_leads(state.teacher_held_out or {}, unigram).get(threshold.metric or primary)
    if score is None:  # no evaluation yet, or of a head that nothing has trained
        return False
    too_low = threshold.at_least is not None and not score >= threshold.at_least
    too_high = threshold.at_most is not None and not score <= threshold.at_most
    return not (too_low or too_high)


def is_over(budget: BudgetConfig, counters: LearnerState, step: int, seconds: float) -> bool:
    """Whether a learner has used up its budget once the job has done `step` steps in `seconds`.

    For a learner that is done, the answer is about the step and time at which it was done, since
    the budget may have been edited.
    """
    if counters.finished_at is not None:
        step, seconds = counters.finished_at, counters.finished_after or seconds
    steps = step - counters.started_at
    return (
        (budget.steps is not None and steps >= budget.steps)
        or (budget.tokens is not None and counters.tokens >= budget.tokens)
        or time_used(budget, counters, seconds, last=math.inf) >= 1
        or has_no_patience_left(budget, counters)
    )


def has_no_patience_left(budget: BudgetConfig, counters: LearnerState) -> bool:
    """Whether a learner's last ``patience`` evaluations were not better than its best."""
    best = counters.best
    return budget.patience is not None and best is not None and best.evaluations >= budget.patience


def schedule_steps(budget: BudgetConfig, counters: LearnerState, step: int, last: int) -> float:
    """The length of a schedule in steps, from the learner's start to its end or the job's `last`.

    A budget in tokens is converted at the learner's average tokens per step up to `step`.
    """
    steps: list[float] = [last - counters.started_at]
    if budget.steps is not None:
        steps.append(budget.steps)
    if budget.tokens is not None and counters.tokens:
        steps.append((step - counters.started_at) * budget.tokens / counters.tokens)
    return min(steps)


def time_used(budget: BudgetConfig, counters: LearnerState, seconds: float, last: float) -> float:
    """The fraction of its time that a learner has used after `seconds` of the job.

    `last` is the job's own limit in seconds. Returns 0 if neither the budget nor the job has a
    limit.
    """
    if counters.clocked_from is None:
        return 0.0
    limit = last - counters.clocked_from
    if budget.hours is not None:
        limit = min(limit, budget.hours * HOUR)
    return (seconds - counters.clocked_from) / max(limit, 1.0)
