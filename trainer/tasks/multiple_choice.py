"""Multiple choice: which of several answers to a question about a passage is the right one."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from torch import Tensor

from configs.progress import counted
from configs.rules import OneOf
from data_pipeline import NO_LABEL, DataError, EncodedExample, TextEncoder
from data_pipeline.task_files.questions import ChoiceQuestion, read_multiple_choice
from model import CHOICE, ModelConfig, ModelShape, TaskHeadConfig
from trainer.batches import MicroBatch
from trainer.objectives.labels import label_cross_entropy
from trainer.objectives.task import TaskConfig, TaskFile, TaskTerm
from trainer.objectives.term import LossInputs, Term, register
from trainer.scoring.metric import Metric
from trainer.scoring.task_metrics import ClassMetric, PartAccuracy

NAME = "multiple_choice"
LEVELS = ("middle", "high")  # RACE-M and RACE-H
QUESTION_WORDS = ("what", "which", "who", "when", "where", "why", "how")
CLOZE, OTHER = "cloze", "other"  # questions with a blank, and those without a question word
PARTS = (*LEVELS, CLOZE, *QUESTION_WORDS, OTHER)
BY_PART = {f"accuracy_{part}": part for part in PARTS}
# The folder that a file is in, or what a record's id begins with.
_LEVEL = re.compile(rf"(?:^|[/\\])({'|'.join(LEVELS)})(?=\d|[/\\])")
_QUESTION_WORD = re.compile(rf"\b({'|'.join(QUESTION_WORDS)})(?:m|se)?\b")


@register(NAME)
@dataclass
class MultipleChoice(TaskConfig):
    """Choose the right one of several answers (the JSON format of RACE and DREAM).

    An example has one sequence per answer: the passage, then the question with the answer in its
    blank ``_``. If the question has no blank, the answer stands after it, in DREAM after a
    separator.
    """

    metrics: Annotated[
        list[str],
        OneOf("accuracy", *BY_PART),
        "The scores, the primary one first; empty: accuracy. accuracy_middle and "
        "accuracy_high score RACE-M and RACE-H separately; the others score questions"
        " with a blank, or by question word.",
    ] = field(default_factory=list)

    name: ClassVar[str] = NAME
    any_tokenizer: ClassVar[bool] = True

    def equip(self, model: ModelConfig) -> ModelConfig:
        return self.with_head(model, TaskHeadConfig(CHOICE))

    def encode(self, file: TaskFile, encoder: TextEncoder) -> Iterator[EncodedExample]:
        choices = 0
        questions = read_multiple_choice(str(file.path), encoding=file.encoding)
        for question in file.first(questions):
            choices = choices or len(question.choices)
            if len(question.choices) != choices:
                given = counted(len(question.choices), "choice")
                why = f"has {given} where the first question has {choices}"
                raise DataError(
                    f"{question.where}: {why}; every question must have the same number"
                )
            assert question.answer is not None
            sequences = [
                encoder.sequence(question.texts_with(choice), question.where)
                for choice in question.choices
            ]
            parts = sum(1 << PARTS.index(part) for part in parts_of(question))
            targets = {self.head: question.answer, PartAccuracy.parts(self.head): parts}
            yield EncodedExample(sequences, targets)

    def choices(self, logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        is_labelled = batch.row_labels(self.head) != NO_LABEL
        return logits.view(-1, batch.sequences), is_labelled.float()

    def own_metrics(self) -> tuple[Metric[Any], ...]:
        return tuple(map(self._metric, self.metrics or ["accuracy"]))

    def _metric(self, name: str) -> Metric[Any]:
        part = BY_PART.get(name)
        if part is None:
            return ClassMetric(self.head, [name])
        return PartAccuracy(self.head, name, f"accuracy, {part}", PARTS.index(part))

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return MultipleChoiceTerm(self)


def parts_of(question: ChoiceQuestion) -> Iterator[str]:
    """The `PARTS` that a question belongs to: its level, if it is RACE's, and its kind."""
    levels = _LEVEL.findall(question.id) or _LEVEL.findall(question.where)
    yield from levels[-1:]
    asked = _QUESTION_WORD.search(question.question.lower())
    yield CLOZE if "_" in question.question else asked[1] if asked else OTHER


class MultipleChoiceTerm(TaskTerm):
    """Cross-entropy over the answers to each question."""

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        scores = inputs.features.heads[self.head].view(-1, inputs.batch.sequences)
        return label_cross_entropy(scores, inputs.batch.row_labels(self.head))
