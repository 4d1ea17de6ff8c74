"""Published schedules."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated

from configs.rules import FRACTION, INDEX, OneOf, Unit, positive
from configs.section import Refusal
from trainer.objectives.term import StepSchedule
from trainer.schedules.learning_rate import (
    KIND,
    DecayConfig,
    Progress,
    ScheduleConfig,
    register_schedule,
)

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
