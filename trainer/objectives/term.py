"""The base of every term of an objective: a loss, what it reads, its denominator and weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from configs.rules import NOT_EMPTY, WEIGHT, Doc
from configs.section import Refusal, Section
from data_pipeline import MASKED
from model import Ability, Capture, Features, ModelConfig, ModelShape
from trainer.batches import MicroBatch
from trainer.denominators import ATTENDED
from trainer.learner_names import MEAN, TEACHER, teacher_key
from trainer.losses.rows import RowLoss
from trainer.losses.vocabulary import project_and_sum
from trainer.objectives.layer_maps import Layers, at_depth, map_layers
from trainer.objectives.step_schedule import Setting, StepSchedule
from trainer.objectives.transfer import LAYERS, PREDICTIONS, Transfer
from trainer.teacher_outputs import OutputProjection, TeacherOutputs

POSITIONS = (MASKED, ATTENDED)
LAST = 1000  # the order of plugins' terms: after those of this project

_REGISTERED: dict[str, tuple[int, type[TermConfig]]] = {}
_Config = TypeVar("_Config", bound="type[TermConfig]")


def register(name: str, order: int = LAST) -> Callable[[_Config], _Config]:
    """A decorator that makes a config class the section `name` of objectives in YAML.

    The name is also the term's name in metrics. Terms are summed by ascending `order`, and by name
    among equals, since rounding depends on the order. Raises TypeError for a class that lacks a
    required method.
    """

    def note(section: _Config) -> _Config:
        assert name not in _REGISTERED, f"two terms are called {name}"
        if missing := ", ".join(sorted(section.__abstractmethods__)):
            raise TypeError(f"{section.__name__} has to define {missing}")
        _REGISTERED[name] = (order, section)
        return section

    return note


def registered_terms() -> dict[str, type[TermConfig]]:
    """The registered sections by name, in the order in which terms are summed."""
    ordered = sorted(_REGISTERED.items(), key=lambda item: (item[1][0], item[0]))
    return {name: section for name, (_, section) in ordered}


@dataclass(frozen=True)
class ExampleLosses:
    """What a loss over the whole batch says of a micro-batch (`trainer.objectives.whole_batch`).

    losses: of each example, [examples]; gradients: at the outputs of a head, in their shape.
    """

    losses: Tensor
    gradients: Tensor


@dataclass(frozen=True)
class LossInputs:
    """Everything a term may read from one micro-batch.

    sources: the outputs of other learners, or the learner's own, under the names that terms use;
    step: the learner's own step, from 0 at its start. whole_batch: by head, the losses over the
    whole batch of this micro-batch's examples, where the rank has several micro-batches.
    """

    batch: MicroBatch
    features: Features
    projection: OutputProjection | None  # None without a masked-LM head
    sources: Mapping[str, TeacherOutputs]
    step: int = 0
    whole_batch: Mapping[str, ExampleLosses] = field(default_factory=dict)


Weight = Annotated[
    Setting,
    WEIGHT,
    Doc("Weight in the objective: a number, or `{step: value, ...}` by the learner's own steps."),
]


@dataclass
class TermConfig(Section, ABC):
    """The YAML section of a term; a number that may change (`Setting`) is kept as written.

    needs: what its head requires of the model; compares: one of `trainer.objectives.transfer`'s.
    """

    needs: ClassVar[tuple[Ability, ...]] = ()
    compares: ClassVar[str] = PREDICTIONS

    weight: Weight = 1.0

    def conflicts(self) -> Iterator[Refusal]:
        if not any(StepSchedule.read(self.weight).values):
            yield "weight", "must not be 0 at every step; to turn a term off, set it to null"

    def misfits(self, student: ModelShape, teacher: ModelShape) -> Iterator[Refusal]:
        """Why the term does not fit this pair of models; an empty key means the whole section."""
        yield from ()

    def misfits_with_stored(self, key: str, top_k: int | None) -> Iterator[Refusal]:
        """Why it cannot read the section `key`, which stores `top_k` logits a token; None: all."""
        if self.reads_states or not self.reads_masked:
            yield "", f"needs more than predictions at masked positions; remove it, or {key}"

    @property
    def source(self) -> str | None:
        """The name of the source that it reads (`trainer.learner_names`); None: labels only."""
        return None

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
        Doc(
            "The teacher to compare with: `teacher`, or a key of `teachers`; for predictions also "
            "`mean`, the mean of all teachers' probabilities at the same temperature."
        ),
    ] = field(default=TEACHER, kw_only=True)

    @property
    def source(self) -> str | None:
        return teacher_key(self.teacher)

    def conflicts(self) -> Iterator[Refusal]:
        yield from super().conflicts()
        if self.teacher == MEAN and self.compares != PREDICTIONS:
            yield "teacher", "only terms that compare predictions take the mean; name one teacher"


class Term(nn.Module, ABC):
    """One weighted loss.

    denominator: the name, in `trainer.denominators`, of what divides its sum; source: as in
    `TermConfig`; reads_logits: whether it reads its source's logits.
    """

    denominator: str
    reads_logits: ClassVar[bool] = False

    def __init__(self, config: TermConfig) -> None:
        super().__init__()
        self.weight = StepSchedule.read(config.weight)
        self.source = config.source
        self.compares = config.compares

    @abstractmethod
    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """The loss of this micro-batch as (sum, count in `denominator`), scalars."""

    def segments(self, step: int) -> list[int]:
        """For each scheduled setting, the number of the linear segment that `step` lies in."""
        settings = (value for value in vars(self).values() if isinstance(value, StepSchedule))
        return [setting.segment(step) for setting in settings]

    def student_capture(self, step: int) -> Capture:
        """What the learner's own forward must return at its `step`."""
        return Capture()

    def source_capture(self, step: int) -> Capture:
        """What its source's forward must return at the learner's `step`."""
        return Capture()

    def concerns(self, targets: Collection[str]) -> bool:
        """Whether it is about a batch that has these targets."""
        return True

    def stand_beside(self, terms: Mapping[str, TermConfig]) -> None:
        """These are the sections of all terms of its objective, by name."""
        return

    def applies(self, inputs: LossInputs) -> bool:
        """Whether its source, if it has one, is there in this step."""
        return self.source is None or self.source in inputs.sources

    def outputs(self, inputs: LossInputs) -> TeacherOutputs:
        """The outputs of its source."""
        assert self.source is not None
        return inputs.sources[self.source]

    def set_teacher_layers(self, teacher_layers: int) -> None:
        """Adapt layer maps to a teacher that has grown to this many layers."""
        return


class VocabularyTerm(Term):
    """A term over the vocabulary, at masked or at all attended positions (its denominator).

    The objective projects once for all terms at the same positions.
    """

    @abstractmethod
    def row_loss(self, inputs: LossInputs) -> RowLoss:
        """The loss per position, for `trainer.losses.vocabulary.project_and_sum`."""

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        total, _ = project_and_sum(*projected(inputs, self.denominator), [self.row_loss(inputs)])
        return total, weigh_positions(inputs, self.denominator).sum()

    def student_capture(self, step: int) -> Capture:
        return Capture(all_positions=self.denominator == ATTENDED)

    def source_capture(self, step: int) -> Capture:
        return Capture(all_positions=self.denominator == ATTENDED and self.reads_logits)


def projected(inputs: LossInputs, positions: str) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """The input [P, E] of the vocabulary projection at these positions, its weight and its bias."""
    assert inputs.projection is not None
    projection = (inputs.projection.weight, inputs.projection.bias)
    x = inputs.features.vocabulary_input if positions == MASKED else inputs.features.all_positions
    assert x is not None
    return x, projection


def weigh_positions(inputs: LossInputs, positions: str) -> Tensor:
    """The weight of each position, float [P]: 1 if it counts, else 0.

    P is B * L for attended positions, and the number of slots for masked ones.
    """
    if positions == MASKED:
        return (inputs.batch.targets[MASKED].labels >= 0).float()
    return inputs.batch.attention_mask.flatten().float()


LayerMap = Annotated[
    Layers,
    Doc(
        "The teacher's layer that each of the student's learns from: a named map, a list with one "
        "number for each student layer, or `{student layer: teacher layer}`."
    ),
]


@dataclass
class LayerTermConfig(TeacherTermConfig):
    """The YAML section of a term over pairs of layers, which count from 1."""

    compares: ClassVar[str] = LAYERS

    layers: LayerMap = "uniform"
    layer_weights: Annotated[
        list[float] | None,
        WEIGHT,
        Doc("The weight of each pair of layers; a pair of weight 0 costs nothing; null: 1 each."),
    ] = None

    @property
    def above(self) -> tuple[int, ...]:
        """Layers compared with the teacher's layer of the same number, listed before the others."""
        return ()

    def layer_map(self, student: ModelShape, teacher: ModelShape) -> dict[int, int]:
        """Student layer -> teacher layer. Raises ValueError where there is no such map."""
        mapped = map_layers(self.layers, student.layers, teacher.layers)
        return {**{layer: layer for layer in self.above}, **mapped}

    def misfits(self, student: ModelShape, teacher: ModelShape) -> Iterator[Refusal]:
        try:
            layers = len(self.layer_map(student, teacher))
        except ValueError as error:
            yield "layers", str(error)
            return
        if self.layer_weights is not None and len(self.layer_weights) != layers:
            yield "layer_weights", f"lists {len(self.layer_weights)} weights for {layers} layers"
        elif self.layer_weights is not None and not any(self.layer_weights):
            yield "layer_weights", "at least one must not be 0"

    def left_out(self, student: ModelShape, teacher: ModelShape) -> set[int]:
        """The student's layers that learn from no layer of the teacher."""
        layers = self.layer_map(student, teacher)
        weights = self.layer_weights or [1.0] * len(layers)
        taught = {ours for ours, weight in zip(layers, weights, strict=True) if weight}
        return set(range(1, student.layers + 1)) - taught


class LayerPair(NamedTuple):
    """A student's layer, the teacher's layer that it learns from, and the weight of the pair."""

    ours: int
    theirs: int
    weight: float


class LayerTerm(Term):
    """A term over pairs of layers: the weighted sum, or mean, of the pairs' losses.

    The map refers to the teacher's final number of layers. While a growing teacher has fewer, the
    layer at the same relative depth stands in (`trainer.objectives.layer_maps.at_depth`).
    """

    reads_attention: ClassVar[bool] = False  # instead of hidden states
    averaged = False  # whether to divide by the layers of the map, also those of weight 0

    def __init__(self, config: LayerTermConfig, student: ModelShape, teacher: ModelShape) -> None:
        super().__init__(config)
        self.map = config.layer_map(student, teacher)
        self.weights = config.layer_weights or [1.0] * len(self.map)
        self.final_layers = self.teacher_layers = teacher.layers
        self.transfer: Transfer | None = None  # if set: perhaps one layer at a time

    @abstractmethod
    def compare(self, inputs: LossInputs, pairs: list[LayerPair]) -> list[tuple[Tensor, Tensor]]:
        """The loss of each pair as (sum, count in `denominator`), before its weight."""

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        pairs = self.pairs(inputs.step)
        found = self.compare(inputs, pairs)
        losses = [pair.weight * loss for pair, (loss, _) in zip(pairs, found, strict=True)]
        divisor = len(self.map) if self.averaged else 1
        return torch.stack(losses).sum() / divisor, found[0][1]

    def transfer_by(self, transfer: Transfer) -> None:
        """Compare the layers that `transfer` compares while it lasts."""
        self.transfer = transfer

    def pairs(self, step: int) -> list[LayerPair]:
        """The pairs that count at the learner's `step`."""
        mapped = at_depth(self.map, self.final_layers, self.teacher_layers)
        pairs = [
            LayerPair(ours, theirs, weight)
            for (ours, theirs), weight in zip(mapped.items(), self.weights, strict=True)
        ]
        only = None if self.transfer is None else self.transfer.layer(step)
        return [pair for pair in pairs if pair.weight and only in (None, pair.ours)]

    def student_capture(self, step: int) -> Capture:
        return self._capture({pair.ours for pair in self.pairs(step)})

    def source_capture(self, step: int) -> Capture:
        return self._capture({pair.theirs for pair in self.pairs(step)})

    def set_teacher_layers(self, teacher_layers: int) -> None:
        self.teacher_layers = teacher_layers

    def _capture(self, layers: set[int]) -> Capture:
        numbers = tuple(sorted(layers))
        return Capture(attention=numbers) if self.reads_attention else Capture(numbers)
