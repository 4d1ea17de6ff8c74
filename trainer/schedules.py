"""Learning-rate schedules: pure functions of the step, so there is no state to save."""

from __future__ import annotations

import math
from dataclasses import dataclass

KINDS = ("linear", "cosine", "constant")


@dataclass
class ScheduleConfig:
    """Linear warm-up over `warmup_steps`, then `kind` down to `floor` times the peak."""

    kind: str = "linear"
    warmup_steps: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        """Refuse unknown kinds and shares out of range."""
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {KINDS}, not {self.kind}")
        if self.warmup_steps < 0:
            raise ValueError("warmup_steps must not be negative")
        if not 0 <= self.floor <= 1:
            raise ValueError("floor is a share of the peak, from 0 to 1")


def factor(config: ScheduleConfig, step: int, steps: float) -> float:
    """The share of the peak learning rate for the 0-based `step` of a learner's `steps`.

    The first step already learns: warm-up gives (step + 1) / warmup_steps.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    shape = {
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "constant": 1.0,
    }[config.kind]
    return config.floor + (1 - config.floor) * shape
