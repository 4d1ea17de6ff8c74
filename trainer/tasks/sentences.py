"""Classification and regression of single sentences and of sentence pairs."""

import dataclasses
import json
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from configs.progress import counted
from configs.rules import OneOf
from configs.section import Refusal
from data_pipeline import NO_LABEL, DataError, EncodedExample, ExampleSplit, TextEncoder
from data_pipeline.task_files.contents import Dropped
from data_pipeline.task_files.tables import Row, as_number, class_names, list_in
from model import CLASSIFICATION, MULTI_LABEL, REGRESSION, ModelConfig, ModelShape, TaskHeadConfig
from model.task_head_config import conflicts_of_numbers
from trainer.batches import MicroBatch
from trainer.denominators import WeightedLabels
from trainer.objectives.labels import (
    UNKNOWN_LABELS,
    ClassWeights,
    advice_on,
    are_measures,
    binary_cross_entropy,
    label_cross_entropy,
    labels_among,
    labels_by_number,
    squared_error,
    weights_of,
    wrong_weights,
)
from trainer.objectives.task import LABEL, TaskConfig, TaskFile, TaskTerm
from trainer.objectives.term import LossInputs, Term, register
from trainer.scoring.metric import Metric
from trainer.scoring.task_metrics import (
    METRICS,
    GroupRanking,
    MetricOf,
    MultiLabelMetric,
    NumberMetric,
)
from trainer.scoring.task_scores import (
    CLASS_SCORES,
    MARGIN_SCORES,
    MULTI_LABEL_SCORES,
    NUMBER_SCORES,
    TREC_NAMES,
    TWO_LABELS,
)

CLASSES, LABELS, NUMBER = "classes", "labels", "number"
_log = logging.getLogger(__name__)


SCORES = dict.fromkeys(
    (*CLASS_SCORES, *MULTI_LABEL_SCORES, *MARGIN_SCORES, *TREC_NAMES, *NUMBER_SCORES)
)


@dataclass
class SentenceTask(TaskConfig):
    """A label, or a number, predicted from the pooled state of the model that reads the texts."""

    labels: Annotated[
        list[str], "The labels, two or more; empty: the labels in the training file, sorted."
    ] = field(default_factory=list)
    target: Annotated[
        str,
        OneOf(CLASSES, LABELS, NUMBER),
        "What is predicted: one of the labels (cross-entropy), any number of the labels "
        "(binary cross-entropy for each; a row has a list in JSON), or a number (squared "
        "error).",
    ] = CLASSES
    activation: Annotated[
        str,
        OneOf("", "relu"),
        "The activation before the output layer; TinyBERT's code has relu. `transformers` "
        "has no class with such an activation, so exports are in Tandem's own format.",
    ] = ""
    class_weights: ClassWeights = field(default_factory=dict)
    numbers: Annotated[
        list[str],
        "Columns of the table with numbers, which the output layer reads beside the pooled "
        "state, standardised by their mean and standard deviation in training.",
    ] = field(default_factory=list)
    means: Annotated[
        list[float], "The means of `numbers`; empty: the means over the training rows."
    ] = field(default_factory=list)
    deviations: Annotated[
        list[float],
        "The standard deviations of `numbers`; empty: the deviations over the training rows.",
    ] = field(default_factory=list)
    unlabelled: Annotated[
        bool,
        "Rows may have an empty label; only terms that need no label, such as branches, "
        "learn from these rows.",
    ] = False
    skip_malformed: Annotated[
        bool,
        "Leave out rows that have another number of columns than the header, and count "
        "them; false: refuse them. QQP has such rows.",
    ] = False
    ignored_labels: Annotated[
        list[str],
        "Rows with one of these labels are left out and counted. In MNLI and SNLI, the "
        "label - means that the annotators disagree.",
    ] = field(default_factory=list)
    metrics: Annotated[
        list[str],
        OneOf(*SCORES),
        "The scores, the primary one first; empty: accuracy for classes; micro_f1, "
        "macro_f1 and accuracy (of every decision) for labels; pearson and spearman for a "
        "number. map, mrr and similar scores rank the pairs that have the same text_a by "
        "their second label.",
    ] = field(default_factory=list)

    class_scores: ClassVar[tuple[str, ...]] = (*CLASS_SCORES, *MARGIN_SCORES)
    any_tokenizer: ClassVar[bool] = True

    def conflicts(self) -> Iterator[Refusal]:
        yield from super().conflicts()
        if self.target == NUMBER and self.labels:
            yield "labels", "target: number has no labels; remove them, or set target: classes"
        fit: Collection[str] = self.class_scores
        if self.target != CLASSES:
            fit = NUMBER_SCORES if self.target == NUMBER else MULTI_LABEL_SCORES
        if not set(self.metrics) <= set(fit):
            yield "metrics", f"with target: {self.target}, choose from {', '.join(fit)}"
        if binary := self._unfit_for(self.labels):
            yield "metrics", f"{binary} needs two labels, and there are {len(self.labels)}"
        if self.target == LABELS and self.unlabelled:
            yield "unlabelled", "an empty list says that no label is right; remove it"
        if self.target != CLASSES and self.ignored_labels:
            yield "ignored_labels", f"target: {self.target} has no such labels; remove them"
        if ignored := ", ".join(sorted({*self.ignored_labels} & {*self.labels})):
            yield "ignored_labels", f"{ignored} is one of the labels; remove it here or there"
        if self.target == NUMBER and self.class_weights:
            yield "class_weights", "target: number has no labels; remove them"
        if self.labels and (wrong := wrong_weights(self.labels, self.class_weights)):
            yield "class_weights", wrong
        if self.labels and len(set(self.labels)) < max(2, len(self.labels)):
            yield "labels", "must name at least two labels, each once"
        yield from conflicts_of_numbers(self.numbers, self.means, self.deviations)
        if taken := ", ".join(sorted({*self.numbers} & {*self.fields})):
            yield "numbers", f"{taken} is a text or the label; remove it"

    def equip(self, model: ModelConfig) -> ModelConfig:
        kind = {NUMBER: REGRESSION, LABELS: MULTI_LABEL}.get(self.target, CLASSIFICATION)
        labels = [] if kind == REGRESSION else self.labels or UNKNOWN_LABELS
        head = TaskHeadConfig(
            kind,
            labels,
            activation=self.activation,
            numbers=self.numbers,
            means=self.means,
            deviations=self.deviations,
        )
        return self.with_head(model, head)

    def with_labels_of(self, file: TaskFile) -> TaskConfig:
        if self.target == NUMBER or self.labels:
            return self
        labels = (
            (place, label)
            for place, row in self.rows(file, *self.placed_fields, dropped=Dropped())
            for label in self._told(row, place)
        )
        names = labels_among(
            file,
            (placed for placed in labels if placed[1] or not self.unlabelled),
            [*self._by_number(file).values()],
            remedy="give one, or set unlabelled: true",
        )
        if binary := self._unfit_for(names):
            why = f"{binary} needs two labels, and there are {', '.join(names)}"
            raise DataError(f"{file.path}: metrics: {why}")
        if wrong := wrong_weights(names, self.class_weights):
            raise DataError(f"{file.path}: class_weights: {wrong}")
        if self.target == CLASSES and are_measures(names):
            _log.warning(
                "%s: its labels are %s such as %s, and each becomes a class; to predict a number, "
                "set objective.%s.target=number of every learner",
                file.path,
                counted(len(names), "number"),
                names[-1],
                self.name,
            )
        return dataclasses.replace(self, labels=names)

    def trained_on(self, examples: ExampleSplit) -> TaskConfig:
        if examples.columns is None or self.means:
            return self
        columns = examples.columns
        for name, is_constant in zip(self.numbers, np.ptp(columns, axis=0) == 0, strict=True):
            if is_constant:
                why = f"{name} is the same in every row that is trained on; remove it"
                raise DataError(f"{self.head}.numbers: {why}")
        means, deviations = columns.mean(axis=0).tolist(), columns.std(axis=0).tolist()
        return dataclasses.replace(self, means=means, deviations=deviations)

    @property
    def numeric_fields(self) -> tuple[str, ...]:
        return tuple(self.numbers)

    @property
    def lists(self) -> tuple[str, ...]:
        return (LABEL,) if self.target == LABELS else ()

    def _told(self, row: Mapping[str, str], place: str) -> list[str]:
        """The label of a row, or all of them."""
        return list_in(row[LABEL], place, LABEL) if self.target == LABELS else [row[LABEL]]

    @property
    def skips_malformed(self) -> bool:
        return self.skip_malformed

    def rows(self, file: TaskFile, *fields: str, dropped: Dropped) -> Iterator[Row]:
        names = self._by_number(file)
        for row in super().rows(file, *fields, dropped=dropped):
            if names and row.values.get(LABEL):
                told = [names.get(label, label) for label in self._told(row.values, row.where)]
                row.values[LABEL] = json.dumps(told) if self.target == LABELS else told[0]
            if (label := row.values.get(LABEL)) in self.ignored_labels:
                dropped.add("row with an ignored label", f"{row.where}: {label}")
            else:
                yield row

    def _by_number(self, file: TaskFile) -> dict[str, str]:
        """The label that each whole number in the file stands for."""
        if self.target == NUMBER:
            return {}
        names = class_names(str(file.path)).get(file.columns.get(LABEL, LABEL), [])
        return labels_by_number(names, self.labels)

    def _unfit_for(self, labels: Sequence[str]) -> str:
        """The metrics that have no meaning with these labels, in words."""
        return ", ".join(name for name in self.metrics if name in TWO_LABELS and len(labels) > 2)

    def encode(self, file: TaskFile, encoder: TextEncoder) -> Iterator[EncodedExample]:
        groups: dict[str, int] = {}
        dropped = Dropped()
        rows = self.rows(file, *self.placed_fields, dropped=dropped)
        for place, row in file.first(rows):
            sequence = encoder.sequence([row[name] for name in self.texts], place)
            targets = self._targets(row, place)
            if self.ranks:
                group = groups.setdefault(row[self.texts[0]], len(groups))
                targets[GroupRanking.group(self.head)] = group
            columns = {name: as_number(place, name, row[name]) for name in self.numbers}
            yield EncodedExample([sequence], targets, columns=columns)
        dropped.tell(file.path)

    @property
    def ranks(self) -> bool:
        """Whether the pairs with the same first text are ranked against each other."""
        return any(name in TREC_NAMES for name in self.metrics)

    def unit_of(self, number: int, example: EncodedExample) -> int:
        group = example.targets.get(GroupRanking.group(self.head), number)
        assert isinstance(group, int)
        return group

    def _targets(self, row: Mapping[str, str], place: str) -> dict[str, Any]:
        if self.target != LABELS:
            return {self.head: self._value(row[LABEL], place)}
        right = {self._value(label, place) for label in self._told(row, place)}
        return {self.head: tuple(int(number in right) for number in range(len(self.labels)))}

    def _value(self, text: str, place: str) -> float:
        if self.unlabelled and not text:
            return math.nan if self.target == NUMBER else NO_LABEL
        if self.target == NUMBER:
            return as_number(place, LABEL, text)
        if text not in self.labels:
            names = f"{', '.join(self.labels)}{advice_on(text, self.labels)}"
            raise DataError(f"{place}: {LABEL}: {text!r} is not one of the labels: {names}")
        return self.labels.index(text)

    @property
    def predicts_a_number(self) -> bool:
        return self.target == NUMBER

    def choices(self, logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        labels = batch.row_labels(self.head)
        if self.target == LABELS:  # as many choices between right and wrong
            decisions = torch.stack([torch.zeros_like(logits), logits], dim=-1).flatten(0, 1)
            return decisions, (labels != NO_LABEL).expand(logits.shape).flatten().float()
        is_labelled = ~labels.isnan() if labels.is_floating_point() else labels != NO_LABEL
        return logits, is_labelled.float()

    def own_metrics(self) -> tuple[Metric[Any], ...]:
        if self.target == NUMBER:
            return (NumberMetric(self.head, self.metrics or ["pearson", "spearman"]),)
        if self.target == LABELS:
            return (MultiLabelMetric(self.head, self.metrics or [*MULTI_LABEL_SCORES][:3]),)
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
    not_encoded: ClassVar[tuple[str, ...]] = tuple(
        key for key in SentenceTask.not_encoded if key != "metrics"
    )  # pairs that are ranked have groups


class SentenceTerm(TaskTerm):
    """See `SentenceTask`."""

    def __init__(self, config: SentenceTask) -> None:
        super().__init__(config)
        self.target, self.weights = config.target, weights_of(config.labels, config.class_weights)
        if self.weights:
            self.denominator = WeightedLabels.of(self.head, self.weights)

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        outputs, labels = inputs.features.heads[self.head], inputs.batch.row_labels(self.head)
        if self.target == NUMBER:
            return squared_error(outputs, labels)
        loss = binary_cross_entropy if self.target == LABELS else label_cross_entropy
        return loss(outputs, labels, self.weights)
