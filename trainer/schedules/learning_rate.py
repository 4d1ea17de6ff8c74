"""Learning-rate schedules: pure functions of how far a learner is, so there is no state to save."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from configs.bounds import INDEX, positive, require_bounds, require_choice
from trainer.objectives.step_schedule import StepSchedule

KINDS = ("linear", "cosine", "constant", "wsd", "points")


@dataclass
class ScheduleConfig:
    """Linear warm-up over `warmup_steps`, then `kind` down to `min_lr_ratio` times the peak.

    `wsd` (warm-up, stable, decay: Hu et al., arXiv 2404.06395) stays at the peak and falls linearly
    over the last `decay_fraction` of the way. `points` goes in lines between given shares of the
    peak at the learner's own steps, however many it makes, and stays at the last.
    """

    kind: str = "linear"
    warmup_steps: int = 0
    decay_fraction: float = 0.1  # for wsd
    min_lr_ratio: float = 0.0
    points: dict[int, float] = field(default_factory=dict)  # {step: share of the peak, ...}

    def __post_init__(self) -> None:
        """Refuse unknown kinds and shares out of range."""
        require_choice(self, kind=KINDS)
        require_bounds(self, warmup_steps=INDEX, decay_fraction=positive(1.0))
        require_bounds(self, min_lr_ratio=(0.0, 1.0), points=(0.0, 1.0))
        if bool(self.points) != (self.kind == "points"):
            raise ValueError("points: set these together with kind: points, or neither")
        if any(step < 0 for step in self.points):
            raise ValueError("points: steps must not be negative")


def factor(config: ScheduleConfig, step: int, steps: float, time_used: float = 0.0) -> float:
    """The share of the peak learning rate for the 0-based `step` of a learner's `steps`.

    The first step already learns: warm-up gives (step + 1) / warmup_steps. Where a learner's time
    is limited, `time_used` is the share of it that is gone: it is as far as the larger of the two.
    """
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    after_warmup = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    done = min(max(after_warmup, time_used, 0.0), 1.0)
    shape = {
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "constant": 1.0,
        "wsd": min(1.0, (1 - done) / config.decay_fraction),
        "points": StepSchedule.read(config.points, "points").at(step) if config.points else 0.0,
    }[config.kind]
    return warm * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)
