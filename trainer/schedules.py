"""Learning-rate schedules: pure functions of a learner's progress, without state to save.

A schedule is a config that `register_schedule` decorates, here or in a file of `plugins:`. Those
here are published ones.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from numbers import Real
from typing import Annotated, Any, NamedTuple, TypeVar

from configs.errors import ConfigError
from configs.kinds import add_kind, chosen
from configs.rules import FRACTION, INDEX, OneOf, Unit, positive
from configs.section import Refusal, Section
from configs.typed import shown
from trainer.objectives.term import StepSchedule

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
    progress is the larger of the fractions of steps and of time. Raises ConfigError where the
    schedule returns something other than a finite number of 0 or more.
    """
    warmup = config.warmup(steps)
    warm = min(1.0, (step + 1) / warmup) if warmup else 1.0
    left = max(1, steps - warmup)
    done = min(max((step - warmup) / left, time_used, 0.0), 1.0)
    fraction = config.fraction(Progress(step, warmup, left, done))
    if not isinstance(fraction, Real) or not 0 <= fraction < math.inf:  # perhaps of a plugin
        name = f"{type(config).__name__}.fraction"
        raise ConfigError(f"{name}: must return a number of 0 or more, not {shown(fraction)}")
    return warm * fraction


FALLS: dict[str, Callable[[float], float]] = {
    "linear": lambda passed: 1 - passed,
    "1-sqrt": lambda passed: 1 - math.sqrt(passed),
    "cosine": lambda passed: (1 + math.cos(math.pi * passed)) / 2,
}
Fall = Annotated[
    str,
    OneOf(*FALLS),
    "How the rate falls, by the fraction d of the decay that has passed: linear, 1 - d; "
    "1-sqrt, 1 minus the root of d (Hägele et al., arXiv 2405.18392; ModernBERT); cosine.",
]


@register_schedule
@dataclass
class Linear(DecayConfig):
    """Falls linearly, as BERT's."""

    kind: Annotated[str, OneOf("linear"), KIND] = "linear"

    def shape(self, progress: Progress) -> float:
        return 1 - progress.done


@register_schedule
@dataclass
class Cosine(DecayConfig):
    """Falls along half a cosine (Loshchilov and Hutter, arXiv 1608.03983)."""

    kind: Annotated[str, OneOf("cosine"), KIND] = "cosine"

    def shape(self, progress: Progress) -> float:
        return (1 + math.cos(math.pi * progress.done)) / 2


@register_schedule
@dataclass
class Constant(ScheduleConfig):
    """Stays at the peak. A fork of the run, with `kind: wsd`, may begin the decay at any step."""

    kind: Annotated[str, OneOf("constant"), KIND] = "constant"

    def fraction(self, progress: Progress) -> float:
        return 1.0


@register_schedule
@dataclass
class WarmupStableDecay(DecayConfig):
    """Warm-up, stable, decay (Hu et al., arXiv 2404.06395): stays at the peak, falls at the end."""

    kind: Annotated[str, OneOf("wsd"), KIND] = "wsd"
    decay_fraction: Annotated[
        float, positive(1.0), "The decay, as the last fraction of the steps after the warm-up."
    ] = 0.1
    decay_steps: Annotated[
        int,
        INDEX,
        Unit("steps"),
        "The decay in steps, instead of decay_fraction; 0: decay_fraction decides.",
    ] = 0
    decay_shape: Fall = "linear"

    def conflicts(self) -> Iterator[Refusal]:
        yield from super().conflicts()
        if self.decay_steps:
            for key in self.changed("decay_fraction"):
                yield key, "set either this or decay_steps; remove one"

    def shape(self, progress: Progress) -> float:
        part = min(1.0, self.decay_steps / progress.left) or self.decay_fraction
        return FALLS[self.decay_shape](1 - min(1.0, (1 - progress.done) / part))


@register_schedule
@dataclass
class Noam(DecayConfig):
    """Falls with the root of the step (Vaswani et al., arXiv 1706.03762, section 5.3).

    Its rate l for models of width d is a peak of l / sqrt(d * warmup_steps).
    """

    kind: Annotated[str, OneOf("noam"), KIND] = "noam"

    def conflicts(self) -> Iterator[Refusal]:
        yield from super().conflicts()
        if not (self.warmup_steps or self.warmup_fraction):
            yield "warmup_steps", "noam falls from the end of the warm-up; set a number of steps"

    def shape(self, progress: Progress) -> float:
        return math.sqrt(progress.warmup / max(progress.step + 1, progress.warmup, 1))


@register_schedule
@dataclass
class Points(DecayConfig):
    """Interpolates between points: a rate that falls in several phases, or restarts lower."""

    kind: Annotated[str, OneOf("points"), KIND] = "points"
    points: Annotated[
        dict[Annotated[int, INDEX], float],
        FRACTION,
        "Fractions of the peak by the learner's own step. The last value holds until the end.",
    ] = field(default_factory=dict)
    decay_shape: Fall = "linear"

    def conflicts(self) -> Iterator[Refusal]:
        yield from super().conflicts()
        if not self.points:
            yield "points", "set one or more, such as {1000: 1.0, 9000: 0.0}"

    def shape(self, progress: Progress) -> float:
        turns = StepSchedule.read(self.points)
        after = turns.segment(progress.step)
        if self.decay_shape == "linear" or after in (0, len(turns.steps)):
            return turns.at(progress.step)
        (start, end), (high, low) = (
            turns.steps[after - 1 : after + 1],
            turns.values[after - 1 : after + 1],
        )
        passed = (progress.step - start) / (end - start)
        return low + (high - low) * FALLS[self.decay_shape](passed)
