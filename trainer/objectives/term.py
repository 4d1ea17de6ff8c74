"""What every term of an objective is: a loss with what it reads, its denominator and weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from configs.rules import WEIGHT, Doc
from configs.section import Refusal, Section
from data_pipeline import MASKED
from model import Ability, Capture, Features, ModelConfig, ModelShape
from trainer.batches import MicroBatch
from trainer.denominators import ATTENDED
from trainer.learner_names import TEACHER
from trainer.losses.rows import RowLoss
from trainer.losses.vocabulary import project_and_sum
from trainer.objectives.layer_maps import Layers, at_depth, map_layers
from trainer.objectives.progressive import Transfer
from trainer.objectives.step_schedule import Setting, StepSchedule
from trainer.teacher_outputs import OutputProjection, TeacherOutputs

POSITIONS = (MASKED, ATTENDED)
LAST = 1000  # the order of terms that are named after those of this project

_REGISTERED: dict[str, tuple[int, type[TermConfig]]] = {}
_Config = TypeVar("_Config", bound="type[TermConfig]")


def register(name: str, order: int = LAST) -> Callable[[_Config], _Config]:
    """A decorator: the section `name` of an objective in YAML, and so the term's name in metrics.

    Terms are summed by ascending `order`, and by name among equals: rounding depends on it. Raises
    TypeError for a section that lacks a method.
    """

    def note(section: _Config) -> _Config:
        assert name not in _REGISTERED, f"two terms are called {name}"
        if missing := ", ".join(sorted(section.__abstractmethods__)):
            raise TypeError(f"{section.__name__} has to define {missing}")
        _REGISTERED[name] = (order, section)
        return section

    return note


def registered_terms() -> dict[str, type[TermConfig]]:
    """The sections that there are, in the order in which terms are summed."""
    ordered = sorted(_REGISTERED.items(), key=lambda item: (item[1][0], item[0]))
    return {name: section for name, (_, section) in ordered}


@dataclass(frozen=True)
class LossInputs:
    """Everything a term may read of one micro-batch.

    sources: what others hand out, or the learner itself, by the name by which a term asks for it;
    step: the learner's own, from 0 at its start.
    """

    batch: MicroBatch
    features: Features
    projection: OutputProjection | None  # None without a masked-LM head
    sources: Mapping[str, TeacherOutputs]
    step: int = 0


Weight = Annotated[
    Setting,
    WEIGHT,
    Doc("Weight in the objective: a number, or `{step: value, ...}` over the learner's steps."),
]


@dataclass
class TermConfig(Section, ABC):
    """The YAML section of a term; a number that may change (`Setting`) is kept as written."""

    needs: ClassVar[tuple[Ability, ...]] = ()  # what its head asks of the model

    weight: Weight = 1.0

    def conflicts(self) -> Iterator[Refusal]:
        if not any(StepSchedule.read(self.weight).values):
            yield "weight", "must not be 0 at every step; null ends a term"

    def misfits(self, student: ModelShape, teacher: ModelShape) -> Iterator[Refusal]:
        """Why it does not fit this pair of models; an empty key means the term as a whole."""
        yield from ()

    @property
    def source(self) -> str | None:
        """The learner whose outputs it reads, by name; None where it reads nobody's."""
        return TEACHER

    @property
    def head(self) -> str | None:
        """The head of the learner's model that it trains, by its target; None: no head."""
        return None

    def equip(self, model: ModelConfig) -> ModelConfig:
        """The model, which has what it `needs`, with the head that it trains."""
        return model

    def refusals(self, packings: Collection[str], masked: bool) -> Iterator[str]:
        """Why it is not about the data: sequences of these `packings`, `masked` or not."""
        if self.reads_masked and not masked:
            yield "reads masked positions, but data.masking.rate is 0"

    @property
    def reads_all_positions(self) -> bool:
        """Whether it reads the learner's own states at every position."""
        return False

    @property
    def reads_masked(self) -> bool:
        """Whether it is about masked positions, and so about nothing in text without them."""
        return False

    @property
    def reads_states(self) -> bool:
        """Whether it reads more of its source than predictions at masked positions."""
        return self.source is not None

    @abstractmethod
    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        """The term for this pair of models, which it fits."""


class Term(nn.Module, ABC):
    """One weighted loss.

    denominator: what divides its sum, by its name in `trainer.denominators`; source: as in
    `TermConfig`; reads_logits: whether it compares with its source's distributions.
    """

    denominator: str
    reads_logits: ClassVar[bool] = False

    def __init__(self, config: TermConfig) -> None:
        super().__init__()
        self.weight = StepSchedule.read(config.weight)
        self.source = config.source

    @abstractmethod
    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """The loss of this micro-batch as (sum, count in `denominator`), scalars."""

    def segments(self, step: int) -> list[int]:
        """Where its settings turn: the same at steps between which they are on one line."""
        settings = (value for value in vars(self).values() if isinstance(value, StepSchedule))
        return [setting.segment(step) for setting in settings]

    def student_capture(self, step: int) -> Capture:
        """What the learner's own forward must hand out at its `step`."""
        return Capture()

    def source_capture(self, step: int) -> Capture:
        """What its source's forward must hand out at the learner's `step`."""
        return Capture()

    def applies(self, inputs: LossInputs) -> bool:
        """Whether its source, if it has one, takes part in this step."""
        return self.source is None or self.source in inputs.sources

    def outputs(self, inputs: LossInputs) -> TeacherOutputs:
        """What its source hands out."""
        assert self.source is not None
        return inputs.sources[self.source]

    def follow(self, teacher_layers: int) -> None:
        """The teacher now has this many layers (it may grow); layer maps follow."""
        return


class VocabularyTerm(Term):
    """A term over the vocabulary, at masked or at all attended positions (its denominator).

    The objective projects once for all of its terms at the same positions.
    """

    @abstractmethod
    def row_loss(self, inputs: LossInputs) -> RowLoss:
        """The loss of single positions, for `trainer.losses.vocabulary.project_and_sum`."""

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        total, _ = project_and_sum(*projected(inputs, self.denominator), [self.row_loss(inputs)])
        return total, weigh_positions(inputs, self.denominator).sum()

    def student_capture(self, step: int) -> Capture:
        return Capture(all_positions=self.denominator == ATTENDED)

    def source_capture(self, step: int) -> Capture:
        return Capture(all_positions=self.denominator == ATTENDED and self.reads_logits)


def projected(inputs: LossInputs, positions: str) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """The vocabulary projection's input [P, E] at these positions, and its projection."""
    assert inputs.projection is not None
    projection = (inputs.projection.weight, inputs.projection.bias)
    x = inputs.features.vocabulary_input if positions == MASKED else inputs.features.all_positions
    assert x is not None
    return x, projection


def weigh_positions(inputs: LossInputs, positions: str) -> Tensor:
    """1 at positions that count and 0 at others, float [P]; P = B * L for attended ones."""
    if positions == MASKED:
        return (inputs.batch.targets[MASKED].labels >= 0).float()
    return inputs.batch.attention_mask.flatten().float()


LayerMap = Annotated[
    Layers,
    Doc(
        "Which layer of the teacher each of ours learns from: by name, as a list for all of ours, "
        "or as `{ours: the teacher's}`."
    ),
]


@dataclass
class LayerTermConfig(TermConfig):
    """The YAML section of a term over pairs of layers, which count from 1."""

    layers: LayerMap = "uniform"
    layer_weights: Annotated[
        list[float] | None,
        WEIGHT,
        Doc("Of each pair of layers; a pair that weighs 0 costs nothing; null: 1 each."),
    ] = None

    @property
    def above(self) -> tuple[int, ...]:
        """Layers that are compared with the teacher's of the same number, before the others."""
        return ()

    def layer_map(self, student: ModelShape, teacher: ModelShape) -> dict[int, int]:
        """Layers of ours, and the teacher's that each learns from; ValueError if there are none."""
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
            yield "layer_weights", "one must not be 0"

    def left_out(self, student: ModelShape, teacher: ModelShape) -> set[int]:
        """The layers of ours that it does not teach."""
        layers = self.layer_map(student, teacher)
        weights = self.layer_weights or [1.0] * len(layers)
        taught = {ours for ours, weight in zip(layers, weights, strict=True) if weight}
        return set(range(1, student.layers + 1)) - taught


class LayerPair(NamedTuple):
    """A layer of ours, the teacher's that it learns from, and what the pair weighs."""

    ours: int
    theirs: int
    weight: float


class LayerTerm(Term):
    """A term over pairs of layers: the loss of each, weighted, and summed or averaged.

    The map is made for the teacher's final number of layers. While a growing teacher has fewer,
    its layer at the same relative depth stands in (`trainer.objectives.layer_maps.at_depth`).
    """

    reads_attention: ClassVar[bool] = False  # and not hidden states
    averaged = False  # over the layers of the map, those that weigh 0 included

    def __init__(
        self,
        config: LayerTermConfig,
        student: ModelShape,
        teacher: ModelShape,
    ) -> None:
        super().__init__(config)
        self.map = config.layer_map(student, teacher)
        self.weights = config.layer_weights or [1.0] * len(self.map)
        self.final_layers = self.teacher_layers = teacher.layers
        self.transfer: Transfer | None = None  # one layer at a time, once set

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
        """Compare one layer at a time while `transfer` lasts."""
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

    def follow(self, teacher_layers: int) -> None:
        self.teacher_layers = teacher_layers

    def _capture(self, layers: set[int]) -> Capture:
        numbers = tuple(sorted(layers))
        return Capture(attention=numbers) if self.reads_attention else Capture(numbers)
