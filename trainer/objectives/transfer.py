"""What a student learns of its teacher's states before it learns to predict.

Everything is a pure function of the learner's own step, so a resumed learner continues alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

# What a term compares: predictions (with labels, too), states, or pairs of layers.
PREDICTIONS, STATES, LAYERS = "predictions", "states", "layers"


class Transfer(ABC):
    """A first part of a learner's steps, and the rates in it: a `trainer.optimizers.Rates`.

    first: what the terms compare that are on while it lasts; afterwards only the others are.
    each_layer: whether each layer of the student must have one of the teacher's.
    """

    first: ClassVar[tuple[str, ...]]
    each_layer: ClassVar[bool] = False

    @property
    @abstractmethod
    def steps(self) -> int:
        """How many steps it takes."""

    @abstractmethod
    def begins_phase(self, step: int) -> bool:
        """Whether the optimizer's moments are forgotten before the learner's `step`."""

    @abstractmethod
    def group(self, parameter: str) -> str:
        """The group of parameters, by its name in the learner's module, that one belongs to."""

    @abstractmethod
    def factor(self, group: str, step: int) -> float:
        """What the learning rate of a group is multiplied by at the learner's `step`."""

    def lasts(self, step: int) -> bool:
        """Whether the learner's `step` is one of its own."""
        return step < self.steps

    def layer(self, step: int) -> int | None:
        """The one layer, from 1, that is compared at the learner's `step`; None: all layers."""
        return None

    def rate(self, peak: float) -> float:
        """The learning rate while it lasts, of a learner whose schedule has this `peak`."""
        return peak
