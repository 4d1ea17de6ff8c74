"""How long the first of two stages of a learner's steps takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from configs.rules import COUNT, Doc, Range, Unit
from configs.section import Refusal, Section

if TYPE_CHECKING:
    from typing import Self  # of Python 3.11 on


@dataclass
class FirstStageConfig(Section):
    """A first stage: its length, in steps or as a fraction of the job's."""

    steps: Annotated[int | None, COUNT, Unit("steps"), Doc("How long it takes.")] = None
    fraction: Annotated[
        float | None, Range(1e-6, 0.999999), Doc("Or as a fraction of the job's steps.")
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        if (self.steps is None) == (self.fraction is None):
            yield "fraction", "set either this or steps"

    def in_steps(self, steps: int) -> Self:
        """The same, without a fraction, in a job of this many steps."""
        if self.fraction is None:
            return self
        return replace(self, steps=max(1, round(self.fraction * steps)), fraction=None)

    @property
    def length(self) -> int:
        """Its length in steps; a fraction has been resolved by `in_steps`."""
        assert self.steps is not None
        return self.steps
