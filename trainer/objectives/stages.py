"""What a learner trains first, by which terms and for how long.

Everything is a pure function of the learner's own step, so a resumed learner continues alike.

- progressive: MobileBERT's progressive knowledge transfer (arXiv 2004.02984, section 3.5), a layer
  at a time, as its code does it
- intermediate: TinyBERT's task distillation (arXiv 1909.10351, section 4.1), one run for attention
  and hidden states, and another, from its weights, for predictions
- task_first: FastBERT's self-distillation (arXiv 2004.02178), the model, then its branches
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from configs.rules import COUNT, INDEX, Doc, Range, Unit, positive
from configs.section import Refusal, Section
from model import READ_OUT

if TYPE_CHECKING:
    from typing import Self  # of Python 3.11 on

# What a term compares: predictions (with labels, too), states, pairs of layers, or branches.
PREDICTIONS, STATES, LAYERS, BRANCHES = "predictions", "states", "layers", "branches"
_LAYER = re.compile(r"model\.encoder\.\w+\.(\d+)\.")
_READ_OUT = tuple(f"model.{name}" for name in READ_OUT)


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


@dataclass
class ProgressiveConfig(TransferConfig):
    """Train a student layer by layer before it learns to predict.

    Each layer in turn is compared with the teacher's for `steps_per_layer` steps. Meanwhile only
    the terms between layers are on, and only for this layer. The layer learns at up to `current`
    times the peak learning rate and the layers before it at up to `earlier` times; everything
    else, the embeddings included, is frozen. Within a layer's steps these rates rise from 0 over
    the first tenth, then fall to 0.9 of themselves. Afterwards only the other terms are on, all
    parameters learn and the schedule begins. Each phase, including the last, starts with fresh
    optimizer moments.
    """

    simplified: ClassVar[str] = "students learn all of their layers at once"

    steps_per_layer: Annotated[
        int, COUNT, Unit("steps"), Doc("How long each layer is compared with the teacher's.")
    ] = 10_000
    current: Annotated[
        float, positive(1e4), Doc("Factor on the learning rate of the layer that learns.")
    ] = 3.0
    earlier: Annotated[
        float, Range(0, 1e4), Doc("Factor on the learning rate of the layers before it.")
    ] = 0.3

    def build(self, layers: int) -> LayerByLayer:
        return LayerByLayer(self, layers)


@dataclass(frozen=True)
class LayerByLayer(Transfer):
    """The progressive transfer of a student with this many `layers`."""

    config: ProgressiveConfig
    layers: int
    first: ClassVar[tuple[str, ...]] = (LAYERS,)
    needs: ClassVar[str] = "terms between layers, and others for afterwards"
    each_layer: ClassVar[bool] = True

    @property
    def steps(self) -> int:
        return self.layers * self.config.steps_per_layer

    def layer(self, step: int) -> int | None:
        return step // self.config.steps_per_layer + 1 if self.lasts(step) else None

    def begins_phase(self, step: int) -> bool:
        """Whether the learner's `step` is the first of a layer, or the first after the transfer."""
        return step % self.config.steps_per_layer == 0 and step <= self.steps

    def group(self, parameter: str) -> str:
        """The number of the layer, from 1, that the parameter belongs to; `rest` for all others."""
        match = _LAYER.match(parameter)
        return str(int(match[1]) + 1) if match else "rest"

    def factor(self, group: str, step: int) -> float:
        current = self.layer(step)
        if current is None:
            return 1.0
        if group == "rest" or int(group) > current:
            return 0.0
        is_current = int(group) == current
        return self._wave(step) * (self.config.current if is_current else self.config.earlier)

    def _wave(self, step: int) -> float:
        """The factor within a layer's steps, as in the code.

        It rises linearly from 0 over the first tenth of the steps, then falls to 0.9.
        """
        if self.config.steps_per_layer == 1:
            return 1.0
        done = step % self.config.steps_per_layer / self.config.steps_per_layer
        return min(0.9 + 0.1 * math.sqrt(1 - done), 10 * done)


@dataclass
class IntermediateConfig(FirstStageConfig):
    """Intermediate layers first: all layers learn from the teacher's before predictions do.

    In this first part of a student's steps only the terms about states and attention are on, at a
    constant learning rate, and the heads and the pooler stay as they are. Afterwards only the
    other terms are on, the optimizer has fresh moments, and the schedule begins.
    """

    simplified: ClassVar[str] = "students compare intermediate layers in all steps"

    def build(self, layers: int) -> AllLayersFirst:
        return AllLayersFirst(self)


@dataclass(frozen=True)
class AllLayersFirst(FirstStage):
    """All layers learn from the teacher's."""

    first: ClassVar[tuple[str, ...]] = (STATES, LAYERS)
    needs: ClassVar[str] = "terms about states or attention, and others for afterwards"

    def group(self, parameter: str) -> str:
        return "read out" if parameter.startswith(_READ_OUT) else "all"

    def factor(self, group: str, step: int) -> float:
        return 0.0 if group == "read out" and self.lasts(step) else 1.0


@dataclass
class TaskFirstConfig(FirstStageConfig):
    """The task first: the model learns it without its branches, which then learn alone.

    Meanwhile the branches stay as they are; afterwards everything else does. The schedule runs over
    each of the two stages, and the optimizer begins the second with fresh moments.
    """

    simplified: ClassVar[str] = "the task is learnt in all steps"

    steps: Annotated[
        int | None,
        INDEX,
        Unit("steps"),
        Doc("How long it takes; 0: the initial weights have learnt the task."),
    ] = None

    from_best: Annotated[
        bool,
        Doc(
            "The branches begin beside the weights with the best evaluation.metric of the first "
            "stage, as in FastBERT's code; false: beside the last ones."
        ),
    ] = True

    def build(self, layers: int) -> TaskFirst:
        return TaskFirst(self)


@dataclass(frozen=True)
class TaskFirst(FirstStage):
    """The task is learnt by everything but the branches."""

    config: TaskFirstConfig

    first: ClassVar[tuple[str, ...]] = (PREDICTIONS, STATES, LAYERS)
    needs: ClassVar[str] = "a task, and branches for afterwards"
    is_scheduled: ClassVar[bool] = True

    @property
    def from_best(self) -> bool:
        return self.config.from_best

    def group(self, parameter: str) -> str:
        is_branch = parameter.startswith("model.task_heads.") and ".branches." in parameter
        return "branches" if is_branch else "all but branches"

    def factor(self, group: str, step: int) -> float:
        return 1.0 if (group == "branches") != self.lasts(step) else 0.0
