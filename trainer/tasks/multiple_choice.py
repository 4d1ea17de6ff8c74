"""Multiple choice: which of several answers to a question about a passage is the right one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from torch import Tensor

from configs.rules import Doc, OneOf
from data_pipeline import NO_LABEL, DataError, EncodedExample, TextEncoder
from data_pipeline.task_files.multiple_choice import read_multiple_choice
from model import CHOICE, ModelConfig, ModelShape, TaskHeadConfig
from trainer.batches import MicroBatch
from trainer.losses.labels import label_cross_entropy
from trainer.objectives.task import TaskConfig, TaskFile, TaskTerm
from trainer.objectives.term import LossInputs, Term, register
from trainer.scoring.metric import Metric
from trainer.scoring.task_metrics import ClassMetric

NAME = "multiple_choice"


@register(NAME)
@dataclass
class MultipleChoice(TaskConfig):
    """Choose the right one of several answers (the JSON format of RACE and DREAM).

    An example has one sequence per answer: the passage, then the question with that answer.
    """

    metrics: Annotated[list[str], OneOf("accuracy"), Doc("The scores; empty: accuracy.")] = field(
        default_factory=list
    )

    name: ClassVar[str] = NAME

    def equip(self, model: ModelConfig) -> ModelConfig:
        return self.with_head(model, TaskHeadConfig(CHOICE))

    def encode(self, file: TaskFile, encoder: TextEncoder) -> Iterator[EncodedExample]:
        choices = 0
        for one in file.first(read_multiple_choice(str(file.path))):
            choices = choices or len(one.choices)
            if len(one.choices) != choices:
                why = f"has {len(one.choices)} choices where the first question has {choices}"
                raise DataError(f"{one.where}: {why}; every question must have the same number")
            assert one.answer is not None
            sequences = [
                encoder.sequence([one.passage, f"{one.question} {choice}"], one.where)
                for choice in one.choices
            ]
            yield EncodedExample(sequences, {self.head: one.answer})

    def choices(self, logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        there = batch.row_labels(self.head) != NO_LABEL
        return logits.view(-1, batch.sequences), there.float()

    def own_metrics(self) -> tuple[Metric[Any], ...]:
        return (ClassMetric(self.head, self.metrics or ["accuracy"]),)

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return MultipleChoiceTerm(self)


class MultipleChoiceTerm(TaskTerm):
    """Cross-entropy over the answers to each question."""

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        scores = inputs.features.heads[self.head].view(-1, inputs.batch.sequences)
        return label_cross_entropy(scores, inputs.batch.row_labels(self.head))
