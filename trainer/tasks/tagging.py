"""Token tagging: the tag of each word, predicted at its first piece (CoNLL's column format)."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from configs.rules import OneOf
from configs.section import Refusal
from data_pipeline import NO_LABEL, DataError, EncodedExample, TextEncoder
from data_pipeline.task_files.conll import (
    LAST,
    TaggedSentence,
    read_conll,
    read_tagged_records,
    tag_column,
)
from data_pipeline.task_files.contents import Dropped
from data_pipeline.task_files.tables import class_names, holds_records
from model import TAGGING, ModelConfig, ModelShape, TaskHeadConfig, log_likelihood
from trainer.batches import MicroBatch
from trainer.denominators import WeightedLabels
from trainer.objectives.labels import (
    UNKNOWN_LABELS,
    ClassWeights,
    advice_on,
    label_cross_entropy,
    labels_among,
    labels_by_number,
    weights_of,
    wrong_weights,
)
from trainer.objectives.task import TaskConfig, TaskFile, TaskTerm
from trainer.objectives.term import LossInputs, Term, register
from trainer.scoring.metric import Metric
from trainer.scoring.task_metrics import TAG_SCORES, TagMetric

NAME = "tagging"
WORD, TAG = "word", "tag"  # the fields of its files
ENTITY = ("B-", "I-", "E-", "S-", "L-", "U-")  # how the tags of entities begin (IOB2, BILOU)
NO_ENTITIES = (
    f"no tag begins with {', '.join(ENTITY)}, as those of entities; set metrics: [accuracy]"
)


@register(NAME)
@dataclass
class Tagging(TaskConfig):
    """The tag of each word, as for named entities. Reads the columns word and tag."""

    labels: Annotated[list[str], "The tags; empty: the tags in the training file, sorted."] = field(
        default_factory=list
    )
    crf: Annotated[bool, "Add a conditional random field over the tags of neighbouring words."] = (
        False
    )
    metrics: Annotated[
        list[str], OneOf(*TAG_SCORES), "The scores, the primary one first; empty: entity_f1."
    ] = field(default_factory=list)

    class_weights: ClassWeights = field(default_factory=dict)

    name: ClassVar[str] = NAME
    not_encoded: ClassVar[tuple[str, ...]] = (*TaskConfig.not_encoded, "crf")

    def equip(self, model: ModelConfig) -> ModelConfig:
        labels = self.labels or UNKNOWN_LABELS
        return self.with_head(model, TaskHeadConfig(TAGGING, labels, crf=self.crf))

    @property
    def placed_fields(self) -> tuple[str, ...]:
        return WORD, TAG

    def with_labels_of(self, file: TaskFile) -> TaskConfig:
        if self.labels:
            return self
        sentences = self._sentences(file)
        tags = labels_among(
            file,
            ((sentence.where, tag) for sentence in sentences for tag in sentence.tags),
            [*self._by_number(file).values()],
        )
        if not self._fits(tags):
            raise DataError(f"{file.path}: {NO_ENTITIES}{advice_on(tags[-1], ())}")
        if wrong := wrong_weights(tags, self.class_weights):
            raise DataError(f"{file.path}: class_weights: {wrong}")
        return dataclasses.replace(self, labels=tags)

    def conflicts(self) -> Iterator[Refusal]:
        yield from super().conflicts()
        if self.labels and not self._fits(self.labels):
            yield "metrics", NO_ENTITIES
        if self.labels and (wrong := wrong_weights(self.labels, self.class_weights)):
            yield "class_weights", wrong
        if self.crf and self.class_weights:
            yield "class_weights", "crf weighs whole sentences; remove one of them"

    def _fits(self, labels: Sequence[str]) -> bool:
        """Whether the metrics have a meaning with these tags: scores of entities need entities."""
        return self._scores == ["accuracy"] or any(label.startswith(ENTITY) for label in labels)

    @property
    def _scores(self) -> list[str]:
        return self.metrics or ["entity_f1"]

    def _sentences(self, file: TaskFile) -> Iterator[TaggedSentence]:
        if holds_records(str(file.path)):
            names = self._by_number(file)
            sentences = read_tagged_records(
                str(file.path),
                file.columns.get(WORD),
                file.columns.get(TAG),
                encoding=file.encoding,
            )
            return (
                dataclasses.replace(
                    sentence, tags=tuple(names.get(tag, tag) for tag in sentence.tags)
                )
                for sentence in sentences
            )
        word, tag = (file.column_number(name) for name in (WORD, TAG))
        return read_conll(str(file.path), word, tag or LAST, file.encoding)

    def _by_number(self, file: TaskFile) -> dict[str, str]:
        """The tag that each whole number in the file stands for."""
        columns = class_names(str(file.path))
        names = columns.get(tag_column(columns, file.columns.get(TAG)), [])
        return labels_by_number(names, self.labels)

    def encode(self, file: TaskFile, encoder: TextEncoder) -> Iterator[EncodedExample]:
        numbers = {label: number for number, label in enumerate(self.labels)}
        dropped = Dropped()
        for sentence in file.first(dropped.present(self._sentences(file))):
            pieces, tags = [], []
            for word, tag in zip(sentence.words, sentence.tags, strict=True):
                if tag not in numbers:
                    names = f"{', '.join(self.labels)}{advice_on(tag, self.labels)}"
                    raise DataError(f"{sentence.where}: {tag!r} is not one of the tags: {names}")
                ids = encoder.word(word)
                pieces += ids
                tags += [numbers[tag], *[NO_LABEL] * (len(ids) - 1)]
            segment, labels = encoder.cut_to_fit(pieces, tags, sentence.where)
            yield EncodedExample([[segment]], {self.head: np.array(labels, np.int64)})
        dropped.tell(file.path)

    def choices(self, logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        target = batch.targets[self.head]
        assert target.positions is not None
        at_words = logits.flatten(0, 1).index_select(0, target.positions)
        return at_words, (target.labels != NO_LABEL).float()

    def own_metrics(self) -> tuple[Metric[Any], ...]:
        return (TagMetric(self.head, self._scores, self.labels),)

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return TaggingTerm(self)


class TaggingTerm(TaskTerm):
    """Cross-entropy of each word's tag; with a CRF, the negative log-likelihood of the sequence.

    Both are summed over sentences and counted in words, or by the weights of their tags.
    """

    def __init__(self, config: Tagging) -> None:
        super().__init__(config)
        self.weights = weights_of(config.labels, config.class_weights)
        if self.weights:
            self.denominator = WeightedLabels.of(self.head, self.weights)

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        target = inputs.batch.targets[self.head]
        logits = inputs.features.heads[self.head]  # [B, L, K]
        assert target.positions is not None
        is_labelled = target.labels != NO_LABEL
        transitions = inputs.features.transitions.get(self.head)
        if transitions is None:
            at_words = logits.flatten(0, 1).index_select(0, target.positions)
            return label_cross_entropy(at_words, target.labels, self.weights)
        # A spare slot stands for no position, so it writes to an extra place behind the last.
        slots = torch.where(is_labelled, target.positions, inputs.batch.input_ids.numel())
        dense = target.labels.new_full((inputs.batch.input_ids.numel() + 1,), NO_LABEL)
        tags = dense.scatter(0, slots, target.labels)[:-1].view_as(inputs.batch.input_ids)
        mask = tags != NO_LABEL
        likelihood = log_likelihood(logits, transitions, tags.clamp(min=0), mask)
        return -likelihood.sum(), is_labelled.sum()
