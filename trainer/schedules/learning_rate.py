"""Learning-rate schedules: pure functions of a learner's progress, without state to save.

A schedule is a module of `trainer.schedules.kinds`, or a file of `plugins:`, with a config that
`register_schedule` decorates.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeVar

from configs.kinds import add_kind, chosen
from configs.rules import FRACTION, INDEX, Unit
from configs.section import Refusal, Section

KIND = "The schedule after the warm-up."
_Config = TypeVar("_Config", bound="type[ScheduleConfig]")


class Progress(NamedTuple):
    """The place of a step among a learner's steps, of which the first is 0.

    warmup: steps of warm-up; left: steps that follow them; done: the fraction of what follows the
    warm-up that has passed, by steps or by time.
    """

    step: int
    warmup: float
    left: float
    done: float


@dataclass
class ScheduleConfig(Section, ABC):
    """The learning rate over a learner's steps: linear warm-up, then what `kind` says."""

    kind: Annotated[str, KIND] = "linear"
    warmup_steps: Annotated[
        int, INDEX, Unit("steps"), "The rate rises linearly to its peak over this many steps."
    ] = 0
    warmup_fraction: Annotated[
        float, FRACTION, "Warm-up as a fraction of the learner's steps, instead of warmup_steps."
    ] = 0.0

    def conflicts(self) -> Iterator[Refusal]:
        if self.warmup_steps and self.warmup_fraction:
            yield "warmup_fraction", "set either this or warmup_steps, and the other one to 0"

    def warmup(self, steps: float) -> float:
        """How many of a learner's `steps` its rate rises."""
        return self.warmup_steps or self.warmup_fraction * steps

    @abstractmethod
    def fraction(self, progress: Progress) -> float:
        """The fraction of the peak rate, without the warm-up's part."""


@dataclass
class DecayConfig(ScheduleConfig):
    """A schedule that falls to a minimum."""

    min_lr_ratio: Annotated[float, FRACTION, "The rate at the end, as a fraction of its peak."] = (
        0.0
    )

    def fraction(self, progress: Progress) -> float:
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * self.shape(progress)

    @abstractmethod
    def shape(self, progress: Progress) -> float:
        """The fraction of the way between the minimum, 0, and the peak, 1."""


def register_schedule(config: _Config) -> _Config:
    """A decorator: `schedule.kind` may be this config's.

    Raises TypeError as `configs.kinds.require_new`.
    """
    return add_kind(ScheduleConfig, config)


def schedule_config(kind: str = "linear", **settings: Any) -> ScheduleConfig:
    """The section of this kind of schedule, with these keys."""
    return chosen(ScheduleConfig, {"kind": kind})(**settings)


def factor(config: ScheduleConfig, step: int, steps: float, time_used: float = 0.0) -> float:
    """The fraction of the peak learning rate at `step`, from 0, of a learner's `steps`.

    During warm-up it is (step + 1) / warm-up steps, so the first step already learns. Where the
    learner's time is limited, `time_used` is the fraction of it that has passed. The learner's
    progress is the larger of the fractions of steps and of time.
    """
    warmup = config.warmup(steps)
    warm = min(1.0, (step + 1) / warmup) if warmup else 1.0
    left = max(1, steps - warmup)
    done = min(max((step - warmup) / left, time_used, 0.0), 1.0)
    return warm * config.fraction(Progress(step, warmup, left, done))
