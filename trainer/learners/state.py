"""The progress of a job: everything that a checkpoint holds besides the learners' tensors.

Dropout, masks, order and learning rates are pure functions of the step and need no state.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from trainer.checkpoint import Ranking
from trainer.optimizers.loss_scale import LossScale
from trainer.watch.guard import Guard


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
    rows: int | None = None  # of metrics.jsonl so far; None in old checkpoints
    config: str = ""  # the job's, resolved, as YAML

    def to_json(self) -> dict[str, Any]:
        """Plain data, for the checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> JobState:
        """The inverse of `to_json`."""
        learners = {
            name: LearnerState.from_json(counters) for name, counters in tree["learners"].items()
        }
        return cls(**{**tree, "learners": learners})
