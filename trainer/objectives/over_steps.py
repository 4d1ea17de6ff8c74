"""Numbers of an objective that may change while a learner trains."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class OverSteps:
    """A number as a pure function of a learner's own step.

    In YAML it is a number, or values at steps: ``{0: 1.0, 10000: 0.1}`` goes down in a line from 1
    at the learner's first step to 0.1 at its 10,000th, and stays there.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]

    @classmethod
    def read(cls, setting: Any, key: str) -> OverSteps:
        """The meaning of a YAML value; raises ValueError, beginning with `key`, if it has none."""
        if not isinstance(setting, Mapping):
            setting = {0: setting}
        try:
            points = sorted((int(step), float(value)) for step, value in setting.items())
            steps, values = zip(*points, strict=True)
        except (TypeError, ValueError):
            raise ValueError(
                f"{key}: {setting} is neither a number nor values at steps, as in "
                "{0: 1.0, 10000: 0.1}"
            ) from None
        if steps[0] < 0 or not np.isfinite(values).all():
            raise ValueError(f"{key}: steps must not be negative, and values must be finite")
        return cls(steps, values)

    def stretch(self, step: int) -> int:
        """Between which of its points a step lies, by their number."""
        return bisect_right(self.steps, step)

    def at(self, step: int) -> float:
        """The value at a step, on the line between the points around it."""
        return float(np.interp(step, self.steps, self.values))
