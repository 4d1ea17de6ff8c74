"""The base of every term of an objective: a loss, what it reads, its denominator and weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from torch import Tensor, nn

from configs.errors import ConfigError
from configs.kinds import require_new
from configs.rules import INDEX, NOT_EMPTY, WEIGHT, Filled
from configs.section import Refusal, Section
from configs.typed import shown
from data_pipeline import DEFAULT_VIEW, MASKED
from model import Ability, Capture, Features, ModelConfig, ModelShape
from trainer.batches import MicroBatch
from trainer.denominators import ATTENDED
from trainer.learner_names import MEAN, TEACHER, teacher_key
from trainer.objectives.stages import PREDICTIONS, Stages
from trainer.stored_logits.format import StoredConfig
from trainer.teacher_outputs import OutputProjection, TeacherOutputs

# In YAML: a number, or values by step.
Setting = float | Annotated[dict[Annotated[int, INDEX], float], Filled()]


@dataclass(frozen=True)
class StepSchedule:
    """A number as a pure function of a learner's own step.

    In YAML it is a number, or values at steps: ``{0: 1.0, 10000: 0.1}`` falls linearly from 1 at
    the learner's first step to 0.1 at step 10,000, and stays there.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]

    @classmethod
    def read(cls, setting: Setting) -> StepSchedule:
        """The schedule that a YAML value describes."""
        if not isinstance(setting, Mapping):
            setting = {0: setting}
        return cls(*zip(*sorted(setting.items()), strict=True))

    def segment(self, step: int) -> int:
        """The number of points at or before `step`; equal for steps on the same linear segment."""
        return bisect_right(self.steps, step)

    def weighs_between(self, first: int, end: int) -> bool:
        """Whether its value is other than 0 at some step in the range [first, end)."""
        turns = [step for step in self.steps if first <= step < end]
        ends = [first, end - 1] if first < end else []
        return any(self.at(step) for step in (*turns, *ends))

    def at(self, step: int) -> float:
        """The value at a step, interpolated linearly between the points around it."""
        return float(np.interp(step, self.steps, self.values))


POSITIONS = (MASKED, ATTENDED)
LAST = 1000  # the order of plugins' terms: after those of this project

_REGISTERED: dict[str, tuple[int, type[TermConfig]]] = {}
_Config = TypeVar("_Config", bound="type[TermConfig]")


def register(name: str, order: int = LAST) -> Callable[[_Config], _Config]:
    """A decorator that makes a config class the section `name` of objectives in YAML.

    The name is also the term's name in metrics. Terms are summed by ascending `order`, and by name
    among equals, since rounding depends on the order. Raises TypeError as `require_new`.
    """

    def note(section: _Config) -> _Config:
        require_new(section, TermConfig, _REGISTERED, name)
        _REGISTERED[name] = (order, section)
        return section

    return note


def registered_terms() -> dict[str, type[TermConfig]]:
    """The registered sections by name, in the order in which terms are summed."""
    ordered = sorted(_REGISTERED.items(), key=lambda item: (item[1][0], item[0]))
    return {name: section for name, (_, section) in ordered}


@dataclass(frozen=True)
class ExampleLosses:
    """The part of a micro-batch in a loss over the whole batch (`WholeBatchTerm`).

    losses: of each example, [examples]; gradients: at the outputs of a head, in their shape.
    """

    losses: Tensor
    gradients: Tensor


@dataclass(frozen=True)
class LossInputs:
    """Everything a term may read from one micro-batch.

    sources: the outputs of other learners, or the learner's own, under the names that terms use;
    step: the learner's own step, from 0 at its start. whole_batch: by term, the losses over the
    whole batch of this micro-batch's examples, if the rank has several micro-batches. views: the
    micro-batch in other forms, by name.
    """

    batch: MicroBatch
    features: Features
    projection: OutputProjection | None  # None without a masked-LM head
    sources: Mapping[str, TeacherOutputs]
    step: int = 0
    whole_batch: Mapping[Term, ExampleLosses] = field(default_factory=dict)
    views: Mapping[str, MicroBatch] = field(default_factory=dict)


Weight = Annotated[
    Setting,
    WEIGHT,
    "Weight in the objective: a number, or `{step: value, ...}` by the learner's own steps.",
]


@dataclass
class TermConfig(Section, ABC):
    """The YAML section of a term; a number that may change (`Setting`) is kept as written.

    needs: what its head requires of the model; compares: see `trainer.objectives.stages`;
    regularises: whether it reads neither labels nor another learner, so that its value says nothing
    about quality. compares_spans: whether it can compare with a source of another tokenizer, at
    aligned spans.
    """

    needs: ClassVar[tuple[Ability, ...]] = ()
    compares: ClassVar[str] = PREDICTIONS
    regularises: ClassVar[bool] = False
    compares_spans: ClassVar[bool] = False

    weight: Weight = 1.0

    @property
    def is_weighted(self) -> bool:
        """Whether it has a weight at any step."""
        return any(StepSchedule.read(self.weight).values)

    def conflicts(self) -> Iterator[Refusal]:
        if not self.is_weighted:
            yield "weight", "must not be 0 at every step; to turn a term off, set it to null"

    def misfits(self, student: ModelShape, teacher: ModelShape) -> Iterator[Refusal]:
        """Why the term does not fit this pair of models; an empty key means the whole section."""
        yield from ()

    def misfits_with_stored(self, key: str, stored: StoredConfig) -> Iterator[Refusal]:
        """Why it cannot read what the section `key` stores of a teacher's predictions."""
        if self.reads_states or not self.reads_masked:
            yield "", f"needs more than predictions at masked positions; remove it, or {key}"

    @property
    def source(self) -> str | None:
        """The name of the source that it reads (`trainer.learner_names`); None: labels only."""
        return None

    @property
    def learns_labels(self) -> bool:
        """Whether it reads no learner's outputs, only labels."""
        return self.source is None and not self.regularises

    @property
    def min_lead_over_student(self) -> float | None:
        """How far the job's own teacher must be ahead before the term counts; None: it always does.

        In nats: by how much its loss is lower.
        """
        return getattr(self, "min_lead", None) if self.source in (TEACHER, MEAN) else None

    @property
    def head(self) -> str | None:
        """The name of the head that it trains in the learner's model; None if it trains none."""
        return None

    def beside(self, name: str, tasks: Collection[str]) -> Mapping[str, TermConfig]:
        """The terms that the section `name` stands for beside tasks with these heads, by name."""
        return {name: self}

    def unequippable(self, model: ModelConfig) -> Iterator[str]:
        """Why the model, which has the heads of the terms before, cannot have the term's."""
        yield from (why for need in self.needs if (why := model.cannot(need)))

    def equip(self, model: ModelConfig) -> ModelConfig:
        """The model with the head that the term trains. The model is not `unequippable`."""
        return model

    def refusals(self, packings: Collection[str], masked: bool) -> Iterator[str]:
        """Why the term does not fit data of these `packings`, `masked` or not."""
        if self.reads_masked and not masked:
            yield "reads masked positions, but data.masking.rate is 0"

    @property
    def reads_all_positions(self) -> bool:
        """Whether it reads the learner's own states at every position."""
        return False

    @property
    def reads_masked(self) -> bool:
        """Whether it reads masked positions only, and so needs masked data."""
        return False

    @property
    def reads_states(self) -> bool:
        """Whether it reads more from its source than predictions at masked positions."""
        return self.source is not None

    @abstractmethod
    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        """The term for this pair of models, for which `misfits` yields nothing."""


@dataclass
class TeacherTermConfig(TermConfig):
    """The YAML section of a term that compares with a teacher.

    Predictions may be compared with the mean of all teachers'.
    """

    teacher: Annotated[
        str,
        NOT_EMPTY,
        "The teacher to compare with: `teacher`, or a key of `teachers`; for predictions also "
        "`mean`, the mean of all teachers' probabilities at the same temperature.",
    ] = field(default=TEACHER, kw_only=True)

    @property
    def source(self) -> str | None:
        return teacher_key(self.teacher)

    def conflicts(self) -> Iterator[Refusal]:
        yield from super().conflicts()
        yield from self.conflicts_with_mean()

    def conflicts_with_mean(self) -> Iterator[Refusal]:
        """A refusal of the mean of all teachers where the term compares states."""
        if self.teacher == MEAN and self.compares != PREDICTIONS:
            yield "teacher", "only terms that compare predictions take the mean; name one teacher"


def weighted(weight: float, loss: Tensor) -> Tensor:
    """``weight * loss``; without a kernel, forward and backward, where the weight is 1."""
    return loss if weight == 1.0 else weight * loss


def returned_sum(returned: Any, function: str) -> Tensor:
    """The sum of the (sum, count) that the `function` of a term, perhaps a plugin's, has returned.

    Raises ConfigError where it is of another form.
    """
    total, _ = returned if isinstance(returned, tuple) and len(returned) == 2 else (None, None)
    if not isinstance(total, Tensor) or total.ndim:
        form = list(total.shape) if isinstance(total, Tensor) else shown(returned)
        raise ConfigError(f"{function}: must return (sum, count), both scalar tensors, not {form}")
    return total


class Term(nn.Module, ABC):
    """One weighted loss.

    denominator: the name, in `trainer.denominators`, of the count that divides its sum; source: as
    in `TermConfig`; reads_logits: whether it reads its source's logits; min_lead: how much lower
    the loss of the job's own teacher must be before the term counts. None: it always counts. view:
    that in which its denominator is counted (`Objective.set_views`). group: terms of one group are
    computed together; empty: it is computed by itself.
    """

    denominator: str
    view = DEFAULT_VIEW
    group: ClassVar[str] = ""
    reads_logits: ClassVar[bool] = False

    def __init__(self, config: TermConfig) -> None:
        super().__init__()
        self.weight = StepSchedule.read(config.weight)
        self.source = config.source
        self.compares = config.compares
        self.learns_labels = config.learns_labels
        self.min_lead = config.min_lead_over_student

    @abstractmethod
    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """The loss of this micro-batch as (sum, count in `denominator`), scalars."""

    def compute(
        self, group: Sequence[Term], weights: Sequence[float], inputs: LossInputs
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The weighted sum of the terms of a `group`, in the graph, and the sum of each.

        It is called for the first one, with all of them.
        """
        total = returned_sum(self(inputs), f"{type(self).__name__}.forward")
        return weighted(weights[0], total), [total]

    def segments(self, step: int) -> list[int]:
        """For each scheduled setting, the number of the linear segment that `step` lies in."""
        settings = vars(self).values()
        return [setting.segment(step) for setting in settings if isinstance(setting, StepSchedule)]

    def student_capture(self, step: int) -> Capture:
        """The outputs that the learner's own forward returns for the term at its `step`."""
        return Capture()

    def source_capture(self, step: int) -> Capture:
        """The outputs that its source's forward returns: by default those of the learner's own."""
        return self.student_capture(step)

    def concerns(self, targets: Collection[str]) -> bool:
        """Whether it is about a batch that has these targets."""
        return True

    def follow(self, stages: Stages) -> None:
        """These are the stages of its learner."""
        return

    def stand_beside(self, terms: Mapping[str, TermConfig]) -> None:
        """These are the sections of all terms of its objective, by name."""
        return

    def outputs(self, inputs: LossInputs) -> TeacherOutputs:
        """The outputs of its source."""
        assert self.source is not None
        return inputs.sources[self.source]

    def set_teacher_layers(self, teacher_layers: int) -> None:
        """Adapt layer maps to a teacher that has grown to this many layers."""
        return
