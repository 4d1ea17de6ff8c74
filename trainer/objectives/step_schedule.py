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

    In YAML it is a number, or values at steps: ``{0: 1.0, 10000: 0.1}`` goes down in a line from 1
    at the learner's first step to 0.1 at its 10,000th, and stays there.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]

    @classmethod
    def read(cls, setting: Setting) -> StepSchedule:
        """The meaning of a YAML value."""
        if not isinstance(setting, Mapping):
            setting = {0: setting}
        return cls(*zip(*sorted(setting.items()), strict=True))

    def segment(self, step: int) -> int:
        """Between which of its points a step lies, by their number."""
        return bisect_right(self.steps, step)

    def weighs_between(self, first: int, end: int) -> bool:
        """Whether it is anything but 0 at a step from `first` up to, and without, `end`."""
        turns = [step for step in self.steps if first <= step < end]
        ends = [first, end - 1] if first < end else []
        return any(self.at(step) for step in (*turns, *ends))

    def at(self, step: int) -> float:
        """The value at a step, on the line between the points around it."""
        return float(np.interp(step, self.steps, self.values))
