"""Learning-rate schedules: pure functions of a learner's progress, without state to save."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from configs.rules import FRACTION, INDEX, Doc, OneOf, Unit, positive
from configs.section import Refusal, Section
from trainer.objectives.term import StepSchedule

KINDS = ("linear", "cosine", "constant", "wsd", "points", "noam")


@dataclass
class ScheduleConfig(Section):
    """The learning rate over a learner's steps: linear warm-up, then decay of the given `kind`."""

    kind: Annotated[
        str,
        OneOf(*KINDS),
        Doc(
            "The decay. wsd (warm-up, stable, decay: Hu et al., arXiv 2404.06395) stays at the "
            "peak and falls linearly at the end; points interpolates linearly between `points`; "
            "noam (Vaswani et al., arXiv 1706.03762, section 5.3) falls with the root of the step, "
            "and its rate l for models of width d is a peak of l / sqrt(d * warmup_steps)."
        ),
    ] = "linear"
    warmup_steps: Annotated[
        int, INDEX, Unit("steps"), Doc("The rate rises linearly to its peak over this many steps.")
    ] = 0
    warmup_fraction: Annotated[
        float,
        FRACTION,
        Doc("Warm-up as a fraction of the learner's steps, instead of warmup_steps."),
    ] = 0.0
    decay_fraction: Annotated[
        float,
        positive(1.0),
        Doc("The last fraction of the steps after the warm-up, over which wsd falls."),
    ] = 0.1
    min_lr_ratio: Annotated[
        float, FRACTION, Doc("Where the rate ends, as a fraction of its peak.")
    ] = 0.0
    points: Annotated[
        dict[Annotated[int, INDEX], float],
        FRACTION,
        Doc(
            "For kind: points, fractions of the peak by the learner's own step. The last value "
            "holds until the end."
        ),
    ] = field(default_factory=dict)

    def conflicts(self) -> Iterator[Refusal]:
        if self.warmup_steps and self.warmup_fraction:
            yield "warmup_fraction", "set either this or warmup_steps, and the other one to 0"
        if bool(self.points) != (self.kind == "points"):
            yield "points", "set these together with kind: points, or neither"
        if self.kind != "wsd":
            for key in self.changed("decay_fraction"):
                yield key, "is for kind: wsd; remove it"
        if self.kind == "noam" and not (self.warmup_steps or self.warmup_fraction):
            yield "warmup_steps", "noam falls from the end of the warm-up; set a number of steps"
        if self.kind == "constant":
            for key in self.changed("min_lr_ratio"):
                yield key, "constant stays at the peak; remove it"

    def warmup(self, steps: float) -> float:
        """How many of a learner's `steps` its rate rises."""
        return self.warmup_steps or self.warmup_fraction * steps


def factor(config: ScheduleConfig, step: int, steps: float, time_used: float = 0.0) -> float:
    """The fraction of the peak learning rate at `step`, from 0, of a learner's `steps`.

    During warm-up it is (step + 1) / warm-up steps, so the first step already learns. Where the
    learner's time is limited, `time_used` is the fraction of it that has passed. The learner's
    progress is the larger of the fractions of steps and of time.
    """
    warmup = config.warmup(steps)
    warm = min(1.0, (step + 1) / warmup) if warmup else 1.0
    after_warmup = (step - warmup) / max(1, steps - warmup)
    done = min(max(after_warmup, time_used, 0.0), 1.0)
    shape = {
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
        "constant": 1.0,
        "wsd": min(1.0, (1 - done) / config.decay_fraction),
        "noam": math.sqrt(warmup / max(step + 1, warmup, 1)),
        "points": StepSchedule.read(config.points).at(step) if config.points else 0.0,
    }[config.kind]
    return warm * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)
