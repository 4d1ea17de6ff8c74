"""The stages of a learner: what it trains, by which terms and for how long.

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
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, ClassVar

from configs.rules import COUNT, INDEX, Range, Unit, positive
from configs.section import Refusal, Section
from model import READ_OUT

if TYPE_CHECKING:
    from typing import Self  # of Python 3.11 on

# What a term compares: predictions (with labels, too), states, pairs of layers, or branches.
PREDICTIONS, STATES, LAYERS, BRANCHES = "predictions", "states", "layers", "branches"
EVERYTHING = frozenset((PREDICTIONS, STATES, LAYERS, BRANCHES))
_LAYER = re.compile(r"model\.encoder\.\w+\.(\d+)\.")
_REST = "rest"
_READ_OUT = tuple(f"model.{name}" for name in READ_OUT)


@dataclass(frozen=True)
class Stage:
    """Some of a learner's own steps.

    steps: how many; None: all that remain. compares: what the terms compare that are on. layer: the
    one layer, from 1, that is compared; None: all. learning_rate: its peak; None: the optimizer's.
    is_scheduled: whether the schedule runs over its steps; otherwise the rate is constant.
    from_best: whether it begins with the best weights of the steps before it, not with the last.
    factor: what the rate of a group of parameters is multiplied by, at a step of the stage, from 0;
    None: 1.
    """

    steps: int | None = None
    compares: frozenset[str] = EVERYTHING
    layer: int | None = None
    learning_rate: float | None = None
    is_scheduled: bool = True
    from_best: bool = False
    factor: Callable[[str, int], float] | None = None


class Stages:
    """The stages of a learner, in order; only the last has all steps that remain.

    The optimizer begins each stage but the first with fresh moments.
    """

    def __init__(self, *stages: Stage, group: Callable[[str], str] = lambda parameter: "all"):
        """`group`: a parameter's name in the learner's module -> its group in `Stage.factor`."""
        self._stages, self.group = stages or (Stage(),), group
        # The learner's own steps at which they begin.
        self.starts = [*accumulate((stage.steps or 0 for stage in self._stages[:-1]), initial=0)]
        self.last_begins = self.starts[-1]

    def __len__(self) -> int:
        return len(self._stages)

    def at(self, step: int) -> tuple[Stage, int]:
        """The stage of the learner's own `step`, and the steps made in that stage."""
        number = max(0, bisect_right(self.starts, step) - 1)
        return self._stages[number], step - self.starts[number]

    def begins(self, step: int) -> bool:
        """Whether a stage other than the first begins at the learner's own `step`."""
        return step in self.starts[1:]

    def spans(self, compares: str, steps: int) -> Iterator[tuple[int, int]]:
        """The ranges of the learner's first `steps` in which terms of a kind are on."""
        ends = [*self.starts[1:], steps]
        for stage, begin, end in zip(self._stages, self.starts, ends, strict=True):
            if compares in stage.compares:
                yield begin, min(end, steps)

    def follows_each_layer(self) -> bool:
        """Whether layers are compared one at a time, so that each must have one to learn from."""
        return any(stage.layer is not None for stage in self._stages)

    def factor(self, group: str, step: int) -> float:
        """The factor of a group's learning rate at the learner's own `step`."""
        stage, done = self.at(step)
        return 1.0 if stage.factor is None else stage.factor(group, done)


@dataclass
class StagesConfig(Section, ABC):
    """The section of a learner that says what it learns first.

    first: what the terms compare that are on before the last stage; in that, only the others are.
    needs: what the objective must have, in words. simplified: what a plan of the job assumes
    instead, in words.
    """

    first: ClassVar[frozenset[str]]
    needs: ClassVar[str]
    simplified: ClassVar[str]

    @abstractmethod
    def build(self, layers: int) -> Stages:
        """The stages of a learner with this many layers."""

    def in_steps(self, steps: int) -> Self:
        """This section without a fraction, in a job of this many steps."""
        return self


@dataclass
class FirstStageConfig(StagesConfig):
    """A first stage: its length, in steps or as a fraction of the job's, and its rate."""

    steps: Annotated[int | None, COUNT, Unit("steps"), "How long it takes."] = None
    fraction: Annotated[
        float | None, Range(1e-6, 0.999999), "Or as a fraction of the job's steps."
    ] = None
    learning_rate: Annotated[
        float | None,
        positive(1e2),
        "Its learning rate, or the peak of it; null: the optimizer's learning rate.",
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


@dataclass
class ProgressiveConfig(StagesConfig):
    """Train a student layer by layer before it learns to predict.

    Each layer in turn is compared with the teacher's for `steps_per_layer` steps. In these steps
    only the terms between layers are on, and only for this layer. The layer learns at up to
    `current` times the peak learning rate and the layers before it at up to `earlier` times;
    everything else, the embeddings included, is frozen. Within a layer's steps these rates rise
    from 0 over the first tenth, then fall to 0.9 of themselves. Afterwards only the other terms are
    on, all parameters learn and the schedule begins. Each phase, including the last, starts with
    fresh optimizer moments.
    """

    first: ClassVar[frozenset[str]] = frozenset((LAYERS,))
    needs: ClassVar[str] = "terms between layers, and others for afterwards"
    simplified: ClassVar[str] = "students learn all of their layers at once"

    steps_per_layer: Annotated[
        int, COUNT, Unit("steps"), "How many steps each layer is trained."
    ] = 10_000
    current: Annotated[
        float, positive(1e4), "Factor on the learning rate of the layer that learns."
    ] = 3.0
    earlier: Annotated[
        float, Range(0, 1e4), "Factor on the learning rate of the layers before it."
    ] = 0.3

    def build(self, layers: int) -> Stages:
        each = Stage(self.steps_per_layer, self.first, is_scheduled=False)
        stages = (
            replace(each, layer=layer, factor=partial(self.factor, layer))
            for layer in range(1, layers + 1)
        )
        return Stages(*stages, Stage(compares=EVERYTHING - self.first), group=_layer_of)

    def factor(self, current: int, group: str, step: int) -> float:
        """The factor while the layer `current` is compared; `group` is of `_layer_of`."""
        if group == _REST or int(group) > current:
            return 0.0
        return self._wave(step) * (self.current if int(group) == current else self.earlier)

    def _wave(self, step: int) -> float:
        """The factor within a layer's steps, as in the code.

        It rises linearly from 0 over the first tenth of the steps, then falls to 0.9.
        """
        if self.steps_per_layer == 1:
            return 1.0
        done = step / self.steps_per_layer
        return min(0.9 + 0.1 * math.sqrt(1 - done), 10 * done)


@dataclass
class IntermediateConfig(FirstStageConfig):
    """Intermediate layers first: all layers learn from the teacher's before predictions do.

    In this first part of a student's steps only the terms about states and attention are on, at a
    constant learning rate, and the heads and the pooler are frozen. Afterwards only the other terms
    are on, the optimizer has fresh moments, and the schedule begins.
    """

    first: ClassVar[frozenset[str]] = frozenset((STATES, LAYERS))
    needs: ClassVar[str] = "terms about states or attention, and others for afterwards"
    simplified: ClassVar[str] = "students compare intermediate layers in all steps"

    def build(self, layers: int) -> Stages:
        first = Stage(
            self.length,
            self.first,
            learning_rate=self.learning_rate,
            is_scheduled=False,
            factor=lambda group, step: float(group != "read out"),
        )
        last = Stage(compares=EVERYTHING - self.first)
        return Stages(first, last, group=_read_out_or_not)


@dataclass
class TaskFirstConfig(FirstStageConfig):
    """The task first: the model learns it without its branches, which then learn alone.

    In this stage the branches are frozen; afterwards everything else is. The schedule runs over
    each of the two stages, and the optimizer begins the second stage with fresh moments.
    """

    first: ClassVar[frozenset[str]] = frozenset((PREDICTIONS, STATES, LAYERS))
    needs: ClassVar[str] = "a task, and branches for afterwards"
    simplified: ClassVar[str] = "the task is learned in all steps"

    steps: Annotated[
        int | None,
        INDEX,
        Unit("steps"),
        "Its number of steps; 0: the initial weights have already learned the task.",
    ] = None

    from_best: Annotated[
        bool,
        "Train the branches on the weights of the first stage with the best "
        "evaluation.metric, as FastBERT's code does; false: on the last weights of the "
        "first stage.",
    ] = True

    def build(self, layers: int) -> Stages:
        first = Stage(
            self.length,
            self.first,
            learning_rate=self.learning_rate,
            factor=lambda group, step: float(group != BRANCHES),
        )
        last = Stage(
            compares=EVERYTHING - self.first,
            from_best=self.from_best,
            factor=lambda group, step: float(group == BRANCHES),
        )
        return Stages(first, last, group=_branches_or_not)


def _layer_of(parameter: str) -> str:
    """The number of the layer, from 1, that a parameter belongs to; `rest` for all others."""
    match = _LAYER.match(parameter)
    return str(int(match[1]) + 1) if match else _REST


def _read_out_or_not(parameter: str) -> str:
    return "read out" if parameter.startswith(_READ_OUT) else "all"


def _branches_or_not(parameter: str) -> str:
    is_branch = parameter.startswith("model.task_heads.") and ".branches." in parameter
    return BRANCHES if is_branch else "all but branches"
