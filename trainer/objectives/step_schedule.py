"""Numbers of an objective that may change while a learner trains."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from configs.rules import INDEX, Filled

# In YAML: a number, or values by step.
Setting = float | Annotated[dict[Annotated[int, INDEX], float], Filled()]


@dataclass(frozen=True)
class StepSchedule:
    """A number as a pure function of a learner's own step.

    In YAML it is a number, or values at steps: ``{0: 1.0, 10000: 0.1}`` falls linearly from 1 at
    the learner's first step to 0.1 at step 10,000, and stays there.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]

    @classmethod
    def read(cls, setting: Setting) -> StepSchedule:
        """The schedule that a YAML value describes."""
        if not isinstance(setting, Mapping):
            setting = {0: setting}
        return cls(*zip(*sorted(setting.items()), strict=True))

    def segment(self, step: int) -> int:
        """The number of points at or before `step`; equal for steps on the same linear segment."""
        return bisect_right(self.steps, step)

    def weighs_between(self, first: int, end: int) -> bool:
        """Whether its value is other than 0 at some step in the range [first, end)."""
        turns = [step for step in self.steps if first <= step < end]
        ends = [first, end - 1] if first < end else []
        return any(self.at(step) for step in (*turns, *ends))

    def at(self, step: int) -> float:
        """The value at a step, interpolated linearly between the points around it."""
        return float(np.interp(step, self.steps, self.values))
