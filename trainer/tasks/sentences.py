"""Classification and regression of single sentences and of sentence pairs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from torch import Tensor

from configs.rules import Doc, OneOf
from configs.section import Refusal
from data_pipeline import NO_LABEL, DataError, EncodedExample, TextEncoder
from data_pipeline.task_files.tables import OnMalformed, Row, as_number
from model import (
    CLASSIFICATION,
    REGRESSION,
    ModelConfig,
    ModelShape,
    TaskHeadConfig,
)
from trainer.batches import MicroBatch
from trainer.losses.labels import label_cross_entropy, squared_error
from trainer.objectives.task import (
    LABEL,
    UNKNOWN_LABELS,
    TaskConfig,
    TaskFile,
    TaskTerm,
    labels_among,
    tell_dropped,
)
from trainer.objectives.term import LossInputs, Term, register
from trainer.scoring.metric import Metric
from trainer.scoring.task_metrics import METRICS, GroupRanking, MetricOf, NumberMetric
from trainer.scoring.task_scores import (
    CLASS_SCORES,
    MARGIN_SCORES,
    NUMBER_SCORES,
    TREC_NAMES,
    TWO_LABELS,
)

CLASSES, NUMBER = "classes", "number"


@dataclass
class SentenceTask(TaskConfig):
    """A label, or a number, predicted from the pooled state of the model that reads the texts."""

    labels: Annotated[
        list[str],
        Doc("The labels, two or more; empty: those in the training file, sorted."),
    ] = field(default_factory=list)
    target: Annotated[
        str,
        OneOf(CLASSES, NUMBER),
        Doc("What is predicted: one of the labels, or a number (squared error)."),
    ] = CLASSES
    activation: Annotated[
        str,
        OneOf("", "relu"),
        Doc(
            "Of what the output layer reads; relu: as in TinyBERT's code. `transformers` has no "
            "class for it, so that exports have Tandem's own format."
        ),
    ] = ""
    unlabelled: Annotated[
        bool,
        Doc(
            "Rows may have an empty label; only terms that need none, such as branches, learn from "
            "them."
        ),
    ] = False
    skip_malformed: Annotated[
        bool,
        Doc(
            "Leave out rows that have another number of columns than the header, counted; they are "
            "refused otherwise. QQP has such rows."
        ),
    ] = False
    metrics: Annotated[
        list[str],
        OneOf(*CLASS_SCORES, *MARGIN_SCORES, *TREC_NAMES, *NUMBER_SCORES),
        Doc(
            "The scores, the primary one first; empty: accuracy for classes, pearson and spearman "
            "for a number. map, mrr and the like rank the pairs that have the same text_a by their "
            "second label."
        ),
    ] = field(default_factory=list)

    class_scores: ClassVar[tuple[str, ...]] = (*CLASS_SCORES, *MARGIN_SCORES)

    def conflicts(self) -> Iterator[Refusal]:
        yield from super().conflicts()
        if self.target == NUMBER and self.labels:
            yield "labels", "target: number has no labels; remove them, or set target: classes"
        fit = NUMBER_SCORES if self.target == NUMBER else self.class_scores
        if not set(self.metrics) <= set(fit):
            yield "metrics", f"with target: {self.target}, choose from {', '.join(fit)}"
        if binary := self._unfit_for(self.labels):
            yield "metrics", f"{binary} needs two labels, and there are {len(self.labels)}"
        if self.labels and len(set(self.labels)) < max(2, len(self.labels)):
            yield "labels", "must name at least two labels, each once"

    def equip(self, model: ModelConfig) -> ModelConfig:
        kind = REGRESSION if self.target == NUMBER else CLASSIFICATION
        labels = [] if kind == REGRESSION else self.labels or UNKNOWN_LABELS
        return self.with_head(model, TaskHeadConfig(kind, labels, activation=self.activation))

    def with_labels_of(self, file: TaskFile) -> TaskConfig:
        if self.target == NUMBER or self.labels:
            return self
        rows = self.rows(file, LABEL)
        labels = ((place, row[LABEL]) for place, row in rows)
        found = labels_among(file, (one for one in labels if one[1] or not self.unlabelled))
        if binary := self._unfit_for(found):
            why = f"{binary} needs two labels, and there are {', '.join(found)}"
            raise DataError(f"{file.path}: metrics: {why}")
        return dataclasses.replace(self, labels=found)

    def rows(
        self,
        file: TaskFile,
        *fields: str,
        on_malformed: OnMalformed | None = None,
        on_blank: Callable[[str], None] = lambda place: None,
    ) -> Iterator[Row]:
        told = (on_malformed or (lambda error: None)) if self.skip_malformed else None
        return super().rows(file, *fields, on_malformed=told, on_blank=on_blank)

    def _unfit_for(self, labels: Sequence[str]) -> str:
        """The metrics that have no meaning with these labels, in words."""
        return ", ".join(name for name in self.metrics if name in TWO_LABELS and len(labels) > 2)

    def encode(self, file: TaskFile, encoder: TextEncoder) -> Iterator[EncodedExample]:
        groups: dict[str, int] = {}
        malformed: list[DataError] = []
        blank: list[str] = []
        tell = malformed.append, blank.append
        rows = self.rows(file, *self.fields, on_malformed=tell[0], on_blank=tell[1])
        for place, row in file.first(rows):
            sequence = encoder.sequence([row[name] for name in self.texts], place)
            targets = {self.head: self._value(row[LABEL], place)}
            if self.ranks:
                group = groups.setdefault(row[self.texts[0]], len(groups))
                targets[GroupRanking.group(self.head)] = group
            yield EncodedExample([sequence], targets)
        tell_dropped(file, "malformed rows", malformed)
        tell_dropped(file, "blank rows", blank)

    @property
    def ranks(self) -> bool:
        """Whether the pairs with the same first text are ranked against each other."""
        return any(name in TREC_NAMES for name in self.metrics)

    def unit_of(self, number: int, example: EncodedExample) -> int:
        group = example.targets.get(GroupRanking.group(self.head), number)
        assert isinstance(group, int)
        return group

    def _value(self, text: str, place: str) -> float:
        if self.unlabelled and not text:
            return math.nan if self.target == NUMBER else NO_LABEL
        if self.target == NUMBER:
            return as_number(place, LABEL, text)
        if text not in self.labels:
            there = ", ".join(self.labels)
            raise DataError(f"{place}: {LABEL}: {text!r} is not one of the labels: {there}")
        return self.labels.index(text)

    def choices(self, logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        labels = batch.row_labels(self.head)
        there = ~labels.isnan() if labels.is_floating_point() else labels != NO_LABEL
        return logits, there.float()

    def own_metrics(self) -> tuple[Metric[Any], ...]:
        if self.target == NUMBER:
            return (NumberMetric(self.head, self.metrics or ["pearson", "spearman"]),)
        names_by_metric: dict[MetricOf, list[str]] = {}
        for name in self.metrics or ["accuracy"]:
            names_by_metric.setdefault(METRICS[name], []).append(name)
        return tuple(metric(self.head, names) for metric, names in names_by_metric.items())

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return SentenceTerm(self)


@register("single_sentence")
@dataclass
class SingleSentence(SentenceTask):
    """The label of a text, or a number about it; reads the columns text and label."""

    name: ClassVar[str] = "single_sentence"
    fields: ClassVar[tuple[str, ...]] = ("text", LABEL)


@register("sentence_pair")
@dataclass
class SentencePair(SentenceTask):
    """The label of two texts, or a number about them; reads the columns text_a, text_b, label."""

    name: ClassVar[str] = "sentence_pair"
    fields: ClassVar[tuple[str, ...]] = ("text_a", "text_b", LABEL)
    views: ClassVar[Mapping[str, tuple[str, ...]]] = {"first": ("text_a",), "second": ("text_b",)}
    class_scores: ClassVar[tuple[str, ...]] = (*SentenceTask.class_scores, *TREC_NAMES)
    not_encoded: ClassVar[tuple[str, ...]] = (
        "weight",
        "layers",
    )  # pairs that are ranked have groups


class SentenceTerm(TaskTerm):
    """See `SentenceTask`."""

    def __init__(self, config: SentenceTask) -> None:
        super().__init__(config)
        self.loss = squared_error if config.target == NUMBER else label_cross_entropy

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        return self.loss(inputs.features.heads[self.head], inputs.batch.row_labels(self.head))
