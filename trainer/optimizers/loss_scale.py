"""The dynamic loss scale of float16.

In float16, gradients below 6e-8 underflow to zero and those above 65504 overflow. The loss is
multiplied by a scale before the backward pass. The gradients, by then float32, are divided by it
before anything reads them. If they overflow nevertheless, the step is skipped and the scale is
halved; after many good steps in a row it is doubled (Micikevicius et al., arXiv 1710.03740).
Scales are powers of two, so that scaling does not round.
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
        int,
        COUNT,
        Unit("steps in a row"),
        Doc("After this many steps without overflow, the scale is doubled."),
    ] = 2000


@dataclass(frozen=True)
class LossScale:
    """A scale, and the number of steps in a row that did not overflow at it."""

    value: float
    good_steps: int = 0

    def after_step(self, growth_interval: int) -> LossScale:
        """The scale after a step that was taken."""
        if self.good_steps + 1 < growth_interval:
            return LossScale(self.value, self.good_steps + 1)
        return LossScale(min(2 * self.value, LARGEST))

    @property
    def can_shrink(self) -> bool:
        """Whether non-finite gradients may be due to the scale: at 1 they are not."""
        return self.value > SMALLEST

    def after_overflow(self) -> LossScale:
        """The scale after non-finite gradients."""
        return LossScale(self.value / 2)
