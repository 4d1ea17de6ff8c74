"""The `average` section of a learner: a second set of weights, the mean of those that it had.

The mean is a state of each parameter beside the optimizer's own: ZeRO cuts it, and checkpoints
store it, as they do those.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated

from configs.kinds import add_kind
from configs.rules import PROBABILITY, OneOf, Range
from configs.section import Section

AVERAGE = "average"  # its name among a parameter's states
KIND = "Which weights are averaged."


@dataclass
class AverageConfig(Section, ABC):
    """A mean of a learner's weights, scored and exported beside the weights themselves."""

    kind: Annotated[str, KIND] = "ema"

    @property
    def window(self) -> int:
        """How many checkpoints it is the mean of; 0: it follows every step."""
        return 0

    @abstractmethod
    def kept(self, steps: int) -> float:
        """The part of the mean that stays in the step after this many; 1: all of it."""


@dataclass
class ExponentialAverage(AverageConfig):
    """The exponential moving average of the weights after each step (Polyak and Juditsky, 1992).

    ``mean = decay * mean + (1 - decay) * weights``. After t steps the decay is at most
    (1 + t) / (10 + t), as in TensorFlow's ExponentialMovingAverage and diffusers' EMAModel, so that
    the weights of the start are soon forgotten.
    """

    kind: Annotated[str, OneOf("ema"), KIND] = "ema"
    decay: Annotated[
        float, PROBABILITY, "The largest fraction of the mean that is kept in a step."
    ] = 0.999

    def kept(self, steps: int) -> float:
        return min(self.decay, (1 + steps) / (10 + steps))


@dataclass
class CheckpointAverage(AverageConfig):
    """The mean of the last checkpoints (Vaswani et al., arXiv 1706.03762, section 6.1; LAWA, arXiv
    2209.14981): those at multiples of `checkpoint.every`, and the one at the learner's end.
    """

    kind: Annotated[str, OneOf("last"), KIND] = "last"
    checkpoints: Annotated[
        int,
        Range(2, 1000),
        "How many of the last checkpoints are averaged; the run keeps them for this.",
    ] = 5

    @property
    def window(self) -> int:
        return self.checkpoints

    def kept(self, steps: int) -> float:
        return 1.0


for _kind in (ExponentialAverage, CheckpointAverage):
    add_kind(AverageConfig, _kind)
