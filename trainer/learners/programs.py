"""Programs: what runs inside an engine's forward pass, given a model, its objective and a batch.

ZeRO-3 gathers a parameter when its module is entered through the engine, so everything that reads
weights runs as a program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

from model import Capture, Features, Model
from trainer.batches import MicroBatch
from trainer.denominators import Totals
from trainer.learner_names import OWN
from trainer.objectives import LossInputs, Objective
from trainer.objectives.term import ExampleLosses, Term
from trainer.scoring.metric import Metric
from trainer.scoring.scores import NO_TEACHERS, ScoreInputs, TeacherHeads, capture_for
from trainer.teacher_outputs import OutputProjection, TeacherOutputs, detach

NOTHING = Capture()
Result = TypeVar("Result", covariant=True)


class Program(Protocol[Result]):
    """A computation in an engine's forward pass."""

    def __call__(self, model: Model, objective: Objective, batch: MicroBatch) -> Result:
        """The program's result on `batch`, computed under the learner's autocast."""


@dataclass(frozen=True)
class Train:
    """Returns the loss share (a scalar to run backward), the term shares [terms], the features.

    totals: the denominators of the global batch; sources: the outputs of other learners, by name;
    capture: what the features must hold; step: the learner's own step, on which the objective
    depends; whole_batch, views: as in `LossInputs`.
    """

    totals: Totals
    sources: Mapping[str, TeacherOutputs]
    capture: Capture = NOTHING
    step: int = 0
    whole_batch: Mapping[Term, ExampleLosses] = field(default_factory=dict)
    views: Mapping[str, MicroBatch] = field(default_factory=dict)

    def __call__(
        self, model: Model, objective: Objective, batch: MicroBatch
    ) -> tuple[Tensor, Tensor, Features]:
        features = features_of(model, batch, self.capture)
        projection = own_projection(model, features)
        sources = dict(self.sources)
        if OWN in objective.sources:
            sources[OWN] = detach(features, projection)
        read = batch, features, projection, sources, self.step, self.whole_batch, self.views
        inputs = LossInputs(*read)
        loss, shares = objective(inputs, self.totals)
        return loss, shares, features


@dataclass(frozen=True)
class Score:
    """Returns what each of `metrics` reads from the batch (`trainer.scoring`).

    teachers: as in `ScoreInputs`.
    """

    metrics: Sequence[Metric[ScoreInputs]]
    teachers: TeacherHeads = field(default_factory=dict)

    def __call__(self, model: Model, objective: Objective, batch: MicroBatch) -> tuple[Tensor, ...]:
        return score(model, batch, self.metrics, self.teachers)


@dataclass(frozen=True)
class Predict:
    """Returns the features alone, with what `capture` asks for."""

    capture: Capture = NOTHING

    def __call__(self, model: Model, objective: Objective, batch: MicroBatch) -> Features:
        return features_of(model, batch, self.capture)


def score(
    model: Model,
    batch: MicroBatch,
    metrics: Sequence[Metric[ScoreInputs]],
    teachers: TeacherHeads = NO_TEACHERS,
) -> tuple[Tensor, ...]:
    """Run `model` on a micro-batch; returns what each metric reads from the result.

    Only heads for which the batch has labels run. `teachers` are as in `ScoreInputs`.
    """
    heads = {metric.head for metric in metrics if _has_labels(batch, metric.head)}
    capture = capture_for(metric for metric in metrics if metric.head in heads)
    features = features_of(model, batch, capture)
    inputs = ScoreInputs(features, own_projection(model, features), batch, model, teachers)
    return tuple(
        metric.of_batch(inputs) if metric.head in heads else metric.empty(batch.input_ids.device)
        for metric in metrics
    )


def compared_heads(
    metrics: Iterable[Metric[ScoreInputs]], batch: MicroBatch
) -> dict[str, tuple[str, ...]]:
    """The heads of other learners with which metrics compare this batch, by learner."""
    compared = [metric for metric in metrics if metric.compares and metric.head in batch.targets]
    sources = dict.fromkeys(metric.compares or "" for metric in compared)
    return {
        source: tuple(metric.head for metric in compared if metric.compares == source)
        for source in sources
    }


def _has_labels(batch: MicroBatch, head: str) -> bool:
    return any(name == head or name.startswith(f"{head}_") for name in batch.targets)


def own_projection(model: Model, features: Features) -> OutputProjection | None:
    """The model's vocabulary projection; None where `features` have no input for it."""
    has_words = features.vocabulary_input is not None
    return OutputProjection(*model.output_projection()) if has_words else None


def features_of(model: Model, batch: MicroBatch, capture: Capture) -> Features:
    """The model's features of a micro-batch, up to the vocabulary projection."""
    read = batch.input_ids, batch.segment_ids, batch.visible, batch.masked_positions
    return model.features(*read, capture, batch.numbers)
