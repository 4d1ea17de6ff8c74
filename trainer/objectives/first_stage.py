"""The first of two stages of a learner's steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from configs.rules import COUNT, Doc, Range, Unit, positive
from configs.section import Refusal
from trainer.objectives.transfer import Transfer, TransferConfig

if TYPE_CHECKING:
    from typing import Self  # of Python 3.11 on


@dataclass
class FirstStageConfig(TransferConfig):
    """A first stage: its length, in steps or as a fraction of the job's, and its rate."""

    steps: Annotated[int | None, COUNT, Unit("steps"), Doc("How long it takes.")] = None
    fraction: Annotated[
        float | None, Range(1e-6, 0.999999), Doc("Or as a fraction of the job's steps.")
    ] = None
    learning_rate: Annotated[
        float | None,
        positive(1e2),
        Doc("Its learning rate, or the peak of it; null: that of the optimizer."),
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        if (self.steps is None) == (self.fraction is None):
            yield "fraction", "set either this or steps"

    def in_steps(self, steps: int) -> Self:
        if self.fraction is None:
            return self
        return replace(self, steps=max(1, round(self.fraction * steps)), fraction=None)

    @property
    def length(self) -> int:
        """Its length in steps; a fraction has been resolved by `in_steps`."""
        assert self.steps is not None
        return self.steps


@dataclass(frozen=True)
class FirstStage(Transfer):
    """The first of two stages; the optimizer begins the second with fresh moments."""

    config: FirstStageConfig

    @property
    def steps(self) -> int:
        return self.config.length

    def begins_phase(self, step: int) -> bool:
        return step == self.steps

    def rate(self, peak: float) -> float:
        return self.config.learning_rate or peak
