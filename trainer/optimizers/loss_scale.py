"""The dynamic loss scale of float16.

Gradients below 6e-8 are lost in float16 and those above 65504 overflow. The loss is multiplied by
a scale before the backward pass and the gradients, float32 by then, are divided by it before
anything looks at them. Where they overflowed nevertheless, the step is left out and the scale
halved; after many good steps it is doubled (Micikevicius et al., arXiv 1710.03740). Scales are
powers of two, so that they do not round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from configs.rules import COUNT, Doc, PowerOfTwo, Unit
from configs.section import Section

SMALLEST, LARGEST = 1.0, 2.0**24


@dataclass
class LossScaleConfig(Section):
    """The dynamic loss scale, for fp16."""

    initial: Annotated[float, PowerOfTwo(SMALLEST, LARGEST), Doc("The first scale.")] = 2.0**16
    growth_interval: Annotated[
        int, COUNT, Unit("steps"), Doc("Good steps in a row after which the scale is doubled.")
    ] = 2000


@dataclass(frozen=True)
class LossScale:
    """A scale, and how many steps in a row were good at it."""

    value: float
    good_steps: int = 0

    def after_step(self, growth_interval: int) -> LossScale:
        """What follows a step that was taken."""
        if self.good_steps + 1 < growth_interval:
            return LossScale(self.value, self.good_steps + 1)
        return LossScale(min(2 * self.value, LARGEST))

    @property
    def can_shrink(self) -> bool:
        """Whether gradients that are not finite may be due to the scale."""
        return self.value > SMALLEST

    def after_overflow(self) -> LossScale:
        """What follows gradients that were not finite."""
        return LossScale(self.value / 2)
