"""The sections of a learner about when it joins a job, and when it is done."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from configs.rules import COUNT, FRACTION, HOURS, INDEX, NOT_EMPTY, Doc, Range, Unit, positive
from configs.section import Refusal, Section


@dataclass
class ThresholdConfig(Section):
    """A held-out score (`evaluation.every`) that is at least, or at most, a number."""

    metric: Annotated[
        str | None,
        NOT_EMPTY,
        Doc(
            "The score; null: evaluation.metric. loss_over_unigram and accuracy_over_unigram are "
            "the differences to the unigram baseline."
        ),
    ] = None
    at_least: Annotated[
        float | None, Range(-1000, 1000), Doc("Reached when the score is at least this.")
    ] = None
    at_most: Annotated[
        float | None, Range(-1000, 1000), Doc("Reached when the score is at most this.")
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        if (self.at_least is None) == (self.at_most is None):
            yield "at_least", "set either this or at_most"


@dataclass
class StartConfig(Section):
    """When a student joins: at a step, and once the teacher has reached a threshold."""

    step: Annotated[int, INDEX, Unit("steps"), Doc("The job's step from which it may join.")] = 0
    fraction: Annotated[
        float | None, FRACTION, Doc("Or the fraction of the job's steps after which it may join.")
    ] = None
    teacher: Annotated[
        ThresholdConfig | None, Doc("The score that the teacher must reach; null: none.")
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        if self.step and self.fraction is not None:
            yield "fraction", "set either this or step"

    def in_steps(self, steps: int) -> StartConfig:
        """This start without a fraction, in a job of this many steps."""
        if self.fraction is None:
            return self
        return dataclasses.replace(self, step=round(self.fraction * steps), fraction=None)


@dataclass
class BudgetConfig(Section):
    """A learner's own budget, counted from its start; without one it trains to the job's end.

    The schedule runs over the budget, except for `patience`. Of several limits, the first one
    reached ends the training. A student is then done; a teacher keeps teaching, at the cost of its
    forward pass. With `hours`, runs are not reproducible, because the time of a step varies.
    """

    steps: Annotated[int | None, COUNT, Unit("steps"), Doc("The learner's own steps.")] = None
    fraction: Annotated[
        float | None, positive(1.0), Doc("Or the learner's own steps, as a fraction of the job's.")
    ] = None
    tokens: Annotated[int | None, COUNT, Unit("tokens"), Doc("Tokens that the learner reads.")] = (
        None
    )
    hours: Annotated[
        float | None,
        HOURS,
        Unit("hours"),
        Doc("Training time over all restarts, not counting a progressive transfer."),
    ] = None
    patience: Annotated[
        int | None,
        COUNT,
        Unit("evaluations"),
        Doc(
            "Its training ends after this many held-out evaluations in a row without a "
            "new best of its primary metric. default: `stop.patience` of the job."
        ),
    ] = None

    def conflicts(self) -> Iterator[Refusal]:
        if self.steps is not None and self.fraction is not None:
            yield "fraction", "set either this or steps"

    def in_steps(self, steps: int) -> BudgetConfig:
        """This budget without a fraction, in a job of this many steps."""
        if self.fraction is None:
            return self
        count = max(1, round(self.fraction * steps))
        return dataclasses.replace(self, steps=count, fraction=None)
