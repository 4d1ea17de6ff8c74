"""Steps that a learner is skipped: its loss is not finite, or stands out from those before.

Everything here is a pure function of all-reduced losses and of state that is in the checkpoint, so
that every rank decides alike, and a resumed run like the one that was not interrupted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from configs.rules import INDEX, Doc, Range, Unit, positive
from configs.section import Section

LOSS, SPIKE, GRADIENT = "loss not finite", "loss spike", "gradient not finite"


@dataclass
class GuardConfig(Section):
    """Which losses are too high to learn from, and how often in a row they may be."""

    sigmas: Annotated[
        float | None,
        positive(1e6),
        Unit("standard deviations"),
        Doc(
            "A loss spikes when it is this far above the mean of the last `window` that were "
            "learnt from; null: only losses that are not finite are skipped."
        ),
    ] = 6.0
    window: Annotated[int, Range(2, 10**6), Unit("steps"), Doc("Losses that are compared.")] = 128
    max_consecutive_skips: Annotated[
        int, INDEX, Unit("steps"), Doc("The job ends after more skipped steps than this in a row.")
    ] = 10


@dataclass
class Guard:
    """What a learner's guard has seen."""

    losses: list[float] = field(default_factory=list)  # the last that were learnt from
    regime: str = ""  # under which they are comparable
    in_a_row: int = 0  # steps skipped just now
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> steps, in all

    def judge(self, config: GuardConfig, loss: float, regime: str) -> str | None:
        """Why a step with this loss must be skipped; None to go ahead.

        Losses of another `regime` (an objective, a sequence length) say nothing about this one.
        """
        if regime != self.regime:
            self.losses, self.regime = [], regime
        if not math.isfinite(loss):
            return LOSS
        if config.sigmas is None or len(self.losses) < config.window:
            return None
        mean, deviation = _moments(self.losses[-config.window :])
        return SPIKE if loss > mean + config.sigmas * deviation else None

    def took(self, config: GuardConfig, loss: float) -> None:
        """Note a step that was learnt from."""
        self.in_a_row = 0
        self.losses = [*self.losses, loss][-config.window :]

    def missed(self, reason: str) -> None:
        """Note a step that was skipped."""
        self.in_a_row += 1
        self.skipped[reason] = self.skipped.get(reason, 0) + 1


def _moments(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation, rounded once each: the same on any machine."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
