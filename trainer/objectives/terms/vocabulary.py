"""Terms over the vocabulary. Terms at the same positions share one vocabulary projection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from configs.rules import COUNT, FRACTION, Doc, OneOf, positive
from configs.section import Refusal
from data_pipeline import MASKED
from model import ModelConfig, ModelShape
from trainer.losses.rows import (
    RowLoss,
    blended_cross_entropy_rows,
    kl_divergence_rows,
    soft_cross_entropy_rows,
)
from trainer.losses.vocabulary_projection import Distribution
from trainer.objectives.step_schedule import Setting, StepSchedule
from trainer.objectives.term import (
    POSITIONS,
    LossInputs,
    TeacherTermConfig,
    TermConfig,
    VocabularyTerm,
    register,
    weigh_positions,
)

Temperature = Annotated[
    Setting,
    positive(1000.0),
    Doc("T: a number, or `{step: value, ...}` by the learner's own steps."),
]


@dataclass
class VocabularyTermConfig(TermConfig):
    """The YAML section of a term over the vocabulary, at masked positions by default."""

    @property
    def head(self) -> str | None:
        return MASKED

    def unequippable(self, model: ModelConfig) -> Iterator[str]:
        yield from super().unequippable(model)
        if not model.mlm_head:
            yield "predicts tokens, for which the learner's model.mlm_head must be true"

    @property
    def reads_masked(self) -> bool:
        return True

    @property
    def reads_states(self) -> bool:
        return not self.reads_masked


def unshared_vocabulary(students: int, teachers: int) -> str:
    """Why predictions over vocabularies of these sizes cannot be compared, and what to do."""
    return (
        f"the student's model.vocab_size is {students:,}, the teacher's {teachers:,}; set both "
        f"alike, padding rows included: student and teacher must share a vocabulary"
    )


@dataclass
class PredictionTermConfig(VocabularyTermConfig, TeacherTermConfig):
    """The YAML section of a term that compares with a teacher's predictions."""

    top_k: Annotated[
        int | None,
        COUNT,
        Doc("k: only the teacher's k largest logits count, as if it had no others. null: all."),
    ] = field(default=None, kw_only=True)

    def misfits(self, student: ModelShape, teacher: ModelShape) -> Iterator[Refusal]:
        if student.vocab_size != teacher.vocab_size:
            yield "", unshared_vocabulary(student.vocab_size, teacher.vocab_size)
        if not teacher.mlm_head:
            yield "", "the teacher has no masked-LM head"
        if self.top_k is not None and self.top_k > teacher.vocab_size:
            yield "top_k", f"the vocabulary has {teacher.vocab_size} tokens; null reads all"

    def misfits_with_stored(self, key: str, top_k: int | None) -> Iterator[Refusal]:
        yield from super().misfits_with_stored(key, top_k)
        if self.top_k is not None and top_k is not None and self.top_k > top_k:
            yield "top_k", f"must be at most {key}.top_k, which is {top_k}; null reads all of these"


class PredictionTerm(VocabularyTerm):
    """A term that compares with a teacher's predictions."""

    reads_logits = True

    def __init__(self, config: PredictionTermConfig) -> None:
        super().__init__(config)
        self.top_k = config.top_k

    def teachers(self, inputs: LossInputs) -> Distribution:
        """The teacher's distribution at the term's positions."""
        found = self.outputs(inputs).distributions[self.denominator]
        return found if self.top_k is None else found.largest(self.top_k)


@register("soft_kl", order=40)
@dataclass
class SoftKL(PredictionTermConfig):
    """T^2 KL(softmax(t / T) || softmax(s / T)) over the vocabulary (Hinton; DistilBERT; PKD)."""

    temperature: Temperature = 1.0
    positions: Annotated[
        str,
        OneOf(*POSITIONS),
        Doc(
            "The positions to compare. `attended`, as in DistilBERT's code, makes a small student "
            "two to three times as expensive."
        ),
    ] = MASKED
    mean_over_labels: Annotated[
        bool, Doc("Also divide by the size of the vocabulary, as PKD's code does.")
    ] = False

    @property
    def reads_masked(self) -> bool:
        return self.positions == MASKED

    def build(self, student: ModelShape, teacher: ModelShape) -> VocabularyTerm:
        return SoftKLTerm(self, student.vocab_size)


class SoftKLTerm(PredictionTerm):
    def __init__(self, config: SoftKL, vocabulary: int) -> None:
        super().__init__(config)
        self.denominator = config.positions
        self.temperature = StepSchedule.read(config.temperature)
        self.divisor = vocabulary if config.mean_over_labels else 1

    def row_loss(self, inputs: LossInputs) -> RowLoss:
        temperature = self.temperature.at(inputs.step)
        weights = weigh_positions(inputs, self.denominator) * (temperature**2 / self.divisor)
        return kl_divergence_rows(self.teachers(inputs), temperature, weights)


@register("soft_cross_entropy", order=50)
@dataclass
class SoftCrossEntropy(PredictionTermConfig):
    """-softmax(t / T') . log softmax(s / T) at masked positions, without T^2.

    TinyBERT's (eq. 10), where T' = T. C-MLM's (arXiv 1911.03829) has T = 1, T' = 10, the 8 largest
    logits, and no mean over labels.
    """

    temperature: Temperature = 1.0
    teacher_temperature: Annotated[
        Setting | None, positive(1000.0), Doc("T', which divides the teacher's logits; null: T.")
    ] = None
    mean_over_labels: Annotated[
        bool, Doc("Divide by the size of the vocabulary, as TinyBERT's code does.")
    ] = True

    def build(self, student: ModelShape, teacher: ModelShape) -> VocabularyTerm:
        return SoftCrossEntropyTerm(self, student.vocab_size)


class SoftCrossEntropyTerm(PredictionTerm):
    denominator = MASKED

    def __init__(self, config: SoftCrossEntropy, vocabulary: int) -> None:
        super().__init__(config)
        self.temperature = StepSchedule.read(config.temperature)
        own = config.teacher_temperature
        self.teacher_temperature = StepSchedule.read(config.temperature if own is None else own)
        self.divisor = vocabulary if config.mean_over_labels else 1

    def row_loss(self, inputs: LossInputs) -> RowLoss:
        ours, theirs = self.temperature.at(inputs.step), self.teacher_temperature.at(inputs.step)
        weights = weigh_positions(inputs, MASKED) / self.divisor
        return soft_cross_entropy_rows(self.teachers(inputs), ours, weights, theirs)


@register("blended", order=60)
@dataclass
class Blended(PredictionTermConfig):
    """-(a softmax(t) + (1 - a) onehot) . log softmax(s) at masked positions (MobileBERT).

    The pre-training distillation of arXiv 2004.02984, section 3.6, whose target mixes the label
    with the teacher's distribution.
    """

    teacher_fraction: Annotated[
        float, FRACTION, Doc("a: the weight of the teacher's distribution in the target.")
    ] = 0.5

    def build(self, student: ModelShape, teacher: ModelShape) -> VocabularyTerm:
        return BlendedTerm(self)


class BlendedTerm(PredictionTerm):
    denominator = MASKED

    def __init__(self, config: Blended) -> None:
        super().__init__(config)
        self.teacher_fraction = config.teacher_fraction

    def row_loss(self, inputs: LossInputs) -> RowLoss:
        labels = inputs.batch.targets[MASKED].labels
        return blended_cross_entropy_rows(self.teachers(inputs), labels, self.teacher_fraction)
