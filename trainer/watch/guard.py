"""The guard: it skips a learner's step when its loss or gradient is non-finite, or its loss spikes.

Everything here is a pure function of all-reduced losses and of checkpointed state. So every rank
decides alike, and a resumed run decides like an uninterrupted one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from configs.rules import FRACTION, INDEX, Doc, Range, Unit, positive
from configs.section import Section

LOSS, SPIKE, GRADIENT = "loss not finite", "loss spike", "gradient not finite"


@dataclass
class GuardConfig(Section):
    """Which losses skip a step, and how many steps in a row may be skipped."""

    sigmas: Annotated[
        float | None,
        positive(1e6),
        Unit("standard deviations"),
        Doc(
            "A loss spikes, and its step is skipped, when it is this far above the mean "
            "loss of the last `window` steps, once that many have been taken. null: only "
            "steps with a non-finite loss or gradient are skipped."
        ),
    ] = 6.0
    window: Annotated[
        int, Range(2, 10**6), Unit("losses"), Doc("The number of losses in the mean.")
    ] = 128
    max_consecutive_skips: Annotated[
        int, INDEX, Unit("skips"), Doc("The job fails after more than this many skips in a row.")
    ] = 10
    max_skipped_fraction: Annotated[
        float,
        FRACTION,
        Doc(
            "The job fails at its end if a larger fraction of the learner's steps was skipped. It "
            "also fails if the last step was skipped."
        ),
    ] = 0.5


@dataclass
class Guard:
    """The state of one learner's guard."""

    losses: list[float] = field(default_factory=list)  # of the last steps taken
    regime: str = ""  # the regime of these losses
    by_task: dict[str, list[float]] = field(default_factory=dict)  # of a job of several tasks
    in_a_row: int = 0  # consecutive steps skipped so far
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> steps, over the whole run

    def judge(self, config: GuardConfig, loss: float, regime: str, task: str = "") -> str | None:
        """Why a step with this loss must be skipped; None to take it.

        Losses of another `regime` (an objective, a sequence length) are not comparable, nor are
        those of another `task`, where a job has several.
        """
        if regime != self.regime:
            self.losses, self.by_task, self.regime = [], {}, regime
        losses = self._losses(task)
        if not math.isfinite(loss):
            return LOSS
        if config.sigmas is None or len(losses) < config.window:
            return None
        mean, deviation = _moments(losses[-config.window :])
        return SPIKE if loss > mean + config.sigmas * deviation else None

    def forget(self) -> None:
        """Forget the losses: those to come are of other data, and compare with none before."""
        self.losses, self.by_task, self.in_a_row = [], {}, 0

    def record_step(self, config: GuardConfig, loss: float, task: str = "") -> None:
        """Record a step that was taken."""
        self.in_a_row = 0
        losses = self._losses(task)
        losses[:] = [*losses, loss][-config.window :]

    def _losses(self, task: str) -> list[float]:
        return self.by_task.setdefault(task, []) if task else self.losses

    def record_skip(self, reason: str) -> None:
        """Record a step that was skipped."""
        self.in_a_row += 1
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


def _moments(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation, correctly rounded sums: the same on any machine."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
