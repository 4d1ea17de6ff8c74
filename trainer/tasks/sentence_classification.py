"""To tell which of several labels a text has, from the pooled state of its model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from torch import Tensor

from configs.rules import NOT_EMPTY, Doc
from configs.section import Refusal
from data_pipeline import Batch, DataError, Target, encode_texts, read_lines
from model import Capture, EncoderConfig, ModelShape, TaskHeadConfig, with_task_head
from trainer import denominators
from trainer.losses.states import label_cross_entropy
from trainer.objectives.term import LossInputs, Term, TermConfig, register

NAME = "sentence_classification"  # of the term, its head, its target and its denominator
denominators.register(NAME, denominators.labelled(NAME))


@register(NAME)
@dataclass
class SentenceClassification(TermConfig):
    """Cross-entropy of the label of each text. The job's corpus says which tokenizer reads it."""

    train: Annotated[
        str, NOT_EMPTY, Doc("A file to train on: a text, a tab and its label in each line.")
    ] = ""
    held_out: Annotated[str, NOT_EMPTY, Doc("Such a file to score on.")] = ""
    labels: Annotated[list[str], Doc("The labels, two or more.")] = field(default_factory=list)

    source: ClassVar[None] = None
    head: ClassVar[str] = NAME
    reads_all_positions: ClassVar[bool] = True

    def conflicts(self) -> Iterator[Refusal]:
        yield from super().conflicts()
        if len(set(self.labels)) < max(2, len(self.labels)):
            yield "labels", "must be two or more, each once"

    @property
    def files(self) -> tuple[str, ...]:
        return self.train, self.held_out

    def equip(self, model: EncoderConfig) -> EncoderConfig:
        return with_task_head(model, NAME, TaskHeadConfig(labels=self.labels))

    def examples(self, split: str, tokenizer_dir: Path, length: int) -> Batch:
        path = Path(self.train if split == "train" else self.held_out)
        texts, labels = [], []
        for number, line in enumerate(read_lines(path), start=1):
            text, tab, label = line.rpartition("\t")
            if not tab or label not in self.labels:
                raise DataError(f"{path}:{number}: must be a text, a tab and one of {self.labels}")
            texts.append(text)
            labels.append(self.labels.index(label))
        targets = {NAME: Target(np.array(labels, np.int64))}
        return encode_texts(texts, targets, tokenizer_dir, length)

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return SentenceClassificationTerm(self)


class SentenceClassificationTerm(Term):
    """See `SentenceClassification`."""

    denominator = NAME

    def student_capture(self, step: int) -> Capture:
        return Capture(heads=(NAME,))

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        return label_cross_entropy(inputs.features.heads[NAME], inputs.batch.row_labels(NAME))
