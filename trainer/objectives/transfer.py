"""What a learner learns first, such as its teacher's states before it learns to predict.

Everything is a pure function of the learner's own step, so a resumed learner continues alike.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from configs.section import Section

if TYPE_CHECKING:
    from typing import Self  # of Python 3.11 on

# What a term compares: predictions (with labels, too), states, pairs of layers, or branches.
PREDICTIONS, STATES, LAYERS, BRANCHES = "predictions", "states", "layers", "branches"


@dataclass
class TransferConfig(Section, ABC):
    """The section of a learner that says what it learns first.

    simplified: what a plan of the job assumes instead, in words.
    """

    simplified: ClassVar[str]

    @abstractmethod
    def build(self, layers: int) -> Transfer:
        """The transfer of a learner with this many layers."""

    def in_steps(self, steps: int) -> Self:
        """The same, without a fraction, in a job of this many steps."""
        return self


class Transfer(ABC):
    """A first part of a learner's steps, and the rates in it: a `trainer.optimizers.Rates`.

    first: what the terms compare that are on while it lasts; afterwards only the others are.
    needs: what the objective must have, in words. each_layer: whether each layer of the student
    must have one of the teacher's. is_scheduled: whether the schedule runs over its steps by
    themselves; otherwise its rate is constant.
    """

    first: ClassVar[tuple[str, ...]]
    needs: ClassVar[str]
    each_layer: ClassVar[bool] = False
    is_scheduled: ClassVar[bool] = False

    @property
    @abstractmethod
    def steps(self) -> int:
        """How many steps it takes."""

    @property
    def from_best(self) -> bool:
        """Whether what follows begins with the best weights of its steps, not with the last."""
        return False

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
        """The learning rate, or its peak, of a learner whose schedule has this `peak`."""
        return peak
