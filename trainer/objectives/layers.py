"""Terms over pairs of layers, and which teacher layer each student layer learns from.

Layers count from 1; layer 0 is the embedding output. With M student and N teacher layers:

- uniform: layer i learns from i * N / M; top: the last M; bottom: the first M (TinyBERT, Jiao et
  al., arXiv 1909.10351, section 4.4.2)
- skip and last: uniform and top without the student's last layer, which learns from predictions
  (PKD, Sun et al., arXiv 1908.09355, section 3.2): for 6 of 12, layers 2, 4 .. 10 and 7, 8 .. 11
- final: the last layer learns from the teacher's last (MiniLM, arXiv 2002.10957)
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from configs.errors import ConfigError
from configs.kinds import require_returned
from configs.rules import WEIGHT, OneOf
from configs.section import Refusal
from model import Capture, ModelShape
from trainer.objectives.stages import LAYERS, Stages
from trainer.objectives.term import (
    LossInputs,
    TeacherTermConfig,
    Term,
    returned_sum,
    weighted,
)

STRATEGIES = ("uniform", "top", "bottom", "skip", "last", "final")
# In YAML.
Layers = Annotated[str, OneOf(*STRATEGIES)] | list[int] | dict[int, int]


def map_layers(layers: Layers, student_layers: int, teacher_layers: int) -> dict[int, int]:
    """Student layer -> teacher layer, from a strategy, a list for all student layers, or a map.

    Raises ValueError, saying why, where a strategy does not fit or a layer does not exist.
    """
    if isinstance(layers, str):
        return _named(layers, student_layers, teacher_layers)
    mapped = _explicit(layers, student_layers)
    if not mapped or not all(
        1 <= ours <= student_layers and 1 <= theirs <= teacher_layers
        for ours, theirs in mapped.items()
    ):
        raise ValueError(
            f"layers must be from 1 to {student_layers} for the student, and from 1 to "
            f"{teacher_layers} for the teacher"
        )
    return mapped


def at_depth(layers: Mapping[int, int], final_layers: int, teacher_layers: int) -> dict[int, int]:
    """Rewrite a map onto a teacher of `final_layers` for its present `teacher_layers`.

    Each teacher layer is replaced by the one at the same relative depth, rounded up: layer 10 of 12
    becomes layer 5 of 6. Layer 0 stays.
    """
    return {ours: -(-theirs * teacher_layers // final_layers) for ours, theirs in layers.items()}


def _explicit(layers: list[int] | dict[int, int], student_layers: int) -> dict[int, int]:
    if isinstance(layers, dict):
        return dict(sorted(layers.items()))
    if len(layers) != student_layers:
        raise ValueError(f"lists {len(layers)} teacher layers for {student_layers} student layers")
    return dict(enumerate(layers, start=1))


def _named(strategy: str, student_layers: int, teacher_layers: int) -> dict[int, int]:
    if strategy == "final":
        return {student_layers: teacher_layers}
    if student_layers > teacher_layers:
        raise ValueError(f"{student_layers} layers cannot map onto a teacher's {teacher_layers}")
    stride, rest = divmod(teacher_layers, student_layers)
    if rest and strategy in ("uniform", "skip"):
        raise ValueError(
            f"no {strategy} map of {student_layers} layers onto {teacher_layers}; list them"
        )
    ours = range(1, student_layers + (strategy not in ("skip", "last")))
    if not ours:
        raise ValueError(f"{strategy} leaves no layer of a model with one")
    if strategy in ("uniform", "skip"):
        return {layer: layer * stride for layer in ours}
    shift = 0 if strategy == "bottom" else teacher_layers - student_layers
    return {layer: layer + shift for layer in ours}


LayerMap = Annotated[
    Layers,
    "For each layer of the student, the layer of the teacher from which it learns: a named "
    "map, a list with one number for each student layer, or `{student layer: teacher "
    "layer}`.",
]


@dataclass
class LayerTermConfig(TeacherTermConfig):
    """The YAML section of a term over pairs of layers, which count from 1."""

    compares: ClassVar[str] = LAYERS

    layers: LayerMap = "uniform"
    layer_weights: Annotated[
        list[float] | None,
        WEIGHT,
        "The weight of each pair of layers; a pair of weight 0 costs nothing; null: 1 each.",
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
        if not teacher.layers:
            yield (
                "",
                "the teacher's layers do not each give a state for every token; compare "
                "predictions, or the last states (soft_kl, cosine)",
            )
            return
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
    layer at the same relative depth is used (`at_depth`).
    """

    averaged = False  # whether to divide by the layers of the map, also those of weight 0

    def __init__(self, config: LayerTermConfig, student: ModelShape, teacher: ModelShape) -> None:
        super().__init__(config)
        self.map = config.layer_map(student, teacher)
        self.weights = config.layer_weights or [1.0] * len(self.map)
        self.final_layers = self.teacher_layers = teacher.layers
        self.stages = Stages()

    @abstractmethod
    def compare(self, inputs: LossInputs, pairs: list[LayerPair]) -> list[tuple[Tensor, Tensor]]:
        """The loss of each pair as (sum, count in `denominator`), before its weight."""

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        pairs = self.pairs(inputs.step)
        results, name = self.compare(inputs, pairs), f"{type(self).__name__}.compare"
        if len(require_returned(results, list, name)) != len(pairs):
            raise ConfigError(f"{name}: must return {len(pairs)} results, not {len(results)}")
        losses = [
            weighted(pair.weight, returned_sum(result, name))
            for pair, result in zip(pairs, results, strict=True)
        ]
        total = torch.stack(losses).sum()
        return total / len(self.map) if self.averaged else total, results[0][1]

    def follow(self, stages: Stages) -> None:
        self.stages = stages

    def pairs(self, step: int) -> list[LayerPair]:
        """The pairs that count at the learner's `step`."""
        mapped = at_depth(self.map, self.final_layers, self.teacher_layers)
        pairs = [
            LayerPair(ours, theirs, weight)
            for (ours, theirs), weight in zip(mapped.items(), self.weights, strict=True)
        ]
        only = self.stages.at(step)[0].layer
        return [pair for pair in pairs if pair.weight and only in (None, pair.ours)]

    def student_capture(self, step: int) -> Capture:
        return self._capture({pair.ours for pair in self.pairs(step)})

    def source_capture(self, step: int) -> Capture:
        return self._capture({pair.theirs for pair in self.pairs(step)})

    def set_teacher_layers(self, teacher_layers: int) -> None:
        self.teacher_layers = teacher_layers

    def _capture(self, layers: set[int]) -> Capture:
        return Capture(tuple(sorted(layers)))
