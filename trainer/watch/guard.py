"""Steps that a learner is skipped: its loss is not finite, or stands out from those before.

Everything here is a pure function of all-reduced losses and of state that is in the checkpoint, so
that every rank decides alike, and a resumed run like the one that was not interrupted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from configs.bounds import INDEX, positive, require_bounds

LOSS, SPIKE, GRADIENT = "loss not finite", "loss spike", "gradient not finite"


@dataclass
class GuardConfig:
    """Which losses are too high to learn from, and how often in a row they may be.

    A loss spikes when it is `sigmas` standard deviations above the mean of the last `window` that
    were learnt from. The job ends after more than `max_consecutive_skips` in a row.
    """

    sigmas: float | None = 6.0  # null: only losses that are not finite
    window: int = 128
    max_consecutive_skips: int = 10

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        require_bounds(
            self, sigmas=positive(1e6), window=(2, 1_000_000), max_consecutive_skips=INDEX
        )


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
