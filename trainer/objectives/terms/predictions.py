"""Terms that compare predictions over the vocabulary, with a teacher, a student or the last layer.

Losses are functions of log-probabilities, as in `trainer.objectives.row_losses`.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from configs.kinds import require_returned
from configs.rules import COUNT, FRACTION, OneOf, Unit, positive
from configs.section import Refusal
from data_pipeline import MASKED
from model import Ability, ModelConfig, ModelShape
from trainer.errors import TrainingError
from trainer.learner_names import student_key
from trainer.objectives import row_losses
from trainer.objectives.row_losses import RowLoss, Target, TeacherTarget
from trainer.objectives.term import (
    POSITIONS,
    LossInputs,
    Setting,
    StepSchedule,
    TeacherTermConfig,
    TermConfig,
    register,
)
from trainer.objectives.vocabulary import VocabularyTerm, labels_at, weigh_positions
from trainer.stored_logits.format import StoredConfig
from trainer.teacher_outputs import TeacherOutputs
from trainer.vocabulary_projection import ABSENT, Distribution, log_probabilities

Temperature = Annotated[
    Setting, positive(1000.0), "T: a number, or `{step: value, ...}` by the learner's own steps."
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
        if not self.reads_masked and Ability.GENERATE in model.abilities:
            yield f"positions must be {MASKED}: a {model.kind} predicts no tokens of its source"

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
class DivergenceConfig(VocabularyTermConfig):
    """The YAML section of a term that compares with the predictions of its source.

    needs_all_logits: whether a token that the source leaves out, with probability 0, has no loss.
    is_linear: whether its gradient is linear in the source's probabilities, so that tokens drawn
    from these give its expectation. any_vocabulary: whether the vocabularies may differ.
    """

    needs_all_logits: ClassVar[bool] = False
    is_linear: ClassVar[bool] = False
    any_vocabulary: ClassVar[bool] = False
    compares_spans: ClassVar[bool] = True

    @abstractmethod
    def loss(self, log_q: Tensor, log_p: Tensor, labels: Tensor) -> Tensor:
        """The loss of each row [C], by log-probabilities [C, V] of the learner and of its source.

        labels: int64 [C], -100 where there is nothing to predict.
        """

    @property
    def positions(self) -> str:
        """The positions that it compares."""
        return MASKED

    @property
    def temperature(self) -> Setting:
        """The divisor of the logits."""
        return 1.0

    @property
    def teacher_temperature(self) -> Setting | None:
        """The divisor of the source's logits; None: the temperature."""
        return None

    def factor(self, temperature: float, vocabulary: int) -> float:
        """The factor of the loss."""
        return temperature**2

    def target(self, teacher: Distribution, temperature: float) -> Target | None:
        """The target for the loss's gradient where that is written by hand."""
        return None

    def outputs(self, outputs: TeacherOutputs) -> Distribution:
        """The source's distribution at the positions, over the learner's own tokens."""
        distribution = outputs.distributions[self.positions]
        if outputs.tokens is None or self.any_vocabulary:
            return distribution
        return distribution.over(outputs.tokens)

    def build(self, student: ModelShape, teacher: ModelShape) -> VocabularyTerm:
        return DivergenceTerm(self, student.vocab_size)


class DivergenceTerm(VocabularyTerm):
    """A loss between the learner's predictions and those of its source."""

    reads_logits = True

    def __init__(self, config: DivergenceConfig, vocabulary: int) -> None:
        super().__init__(config)
        self.config, self.vocabulary, self.denominator = config, vocabulary, config.positions
        self.temperature = StepSchedule.read(config.temperature)
        theirs = config.teacher_temperature
        self.teacher_temperature = self.temperature if theirs is None else StepSchedule.read(theirs)
        even = torch.full((2, vocabulary), 1 / vocabulary)
        self._loss(even.log(), even, torch.zeros(2, dtype=torch.int64))  # it may be first on late

    def row_loss(self, inputs: LossInputs) -> RowLoss:
        ours, theirs = self.temperature.at(inputs.step), self.teacher_temperature.at(inputs.step)
        weights = weigh_positions(inputs, self.denominator)
        weights = weights * self.config.factor(ours, self.vocabulary)
        outputs = self.outputs(inputs)
        teacher = self.config.outputs(outputs)
        if teacher.shape[1] != self.vocabulary:
            teacher = teacher.read_over(self.vocabulary)
        labels = labels_at(inputs, self.denominator)

        def operands(rows: slice) -> tuple[Tensor, Tensor]:
            return teacher.at(rows, theirs)[0], labels[rows]

        if outputs.tokens is None or self.config.any_vocabulary:
            target = self.config.target(teacher, theirs)
            return RowLoss(self._loss, weights, ours, target, operands=operands)
        common = outputs.tokens >= 0
        weights = weights * common[labels.clamp(min=0)]
        some = partial(self._loss_among, common)
        return RowLoss(some, weights, ours, operands=operands)

    def _loss(self, log_q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
        name = f"{type(self.config).__name__}.loss"
        losses = self.config.loss(log_q, log_probabilities(p), labels)
        if require_returned(losses, Tensor, name).shape != labels.shape:
            raise TrainingError(  # a mean would count at each position
                f"{name}: must return the loss of each position, "
                f"{list(labels.shape)}, not {list(losses.shape)}"
            )
        if log_q.requires_grad and not losses.requires_grad:
            raise TrainingError(f"{name}: its result must have a gradient by log_q; do not detach")
        return losses

    def _loss_among(self, common: Tensor, log_q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
        return self._loss(among(log_q, common), p, labels)


MinLead = Annotated[
    float | None,
    positive(100.0),
    Unit("nats"),
    "How far the teacher must be ahead of the student before the term counts, measured by "
    "the loss that both learn from labels. From twice this lead on the term counts fully. "
    "The rule also holds after the teacher's budget. null: the term always counts fully. "
    "It also does if the teacher is frozen, or if the two share no loss from labels.",
]


@dataclass
class PredictionTermConfig(DivergenceConfig, TeacherTermConfig):
    """The YAML section of a term that compares with a teacher's predictions."""

    min_lead: MinLead = field(default=0.25, kw_only=True)
    top_k: Annotated[
        int | None, COUNT, "k: only the teacher's k largest logits count. null: all."
    ] = field(default=None, kw_only=True)

    def misfits(self, student: ModelShape, teacher: ModelShape) -> Iterator[Refusal]:
        if not teacher.mlm_head:
            yield "", "the teacher has no masked-LM head"
        if self.top_k is not None and self.top_k > teacher.vocab_size:
            yield "top_k", f"the vocabulary has {teacher.vocab_size} tokens; null reads all"
        if self.top_k is not None and self.needs_all_logits:
            yield "top_k", "must be null: the loss reads every token's probability"

    def misfits_with_stored(self, key: str, stored: StoredConfig) -> Iterator[Refusal]:
        yield from super().misfits_with_stored(key, stored)
        if stored.samples is not None:
            yield from self._misfits_with_samples(key, stored.temperature)
            return
        top_k = stored.top_k
        if self.top_k is not None and top_k is not None and self.top_k > top_k:
            yield "top_k", f"must be at most {key}.top_k, which is {top_k}; null reads all of these"
        if self.needs_all_logits and top_k is not None:
            yield "", f"reads every token's probability, so {key}.top_k must be null"

    def _misfits_with_samples(self, key: str, temperature: float) -> Iterator[Refusal]:
        if not self.is_linear:
            yield "", f"is not linear in the target, so draws would bias it; remove {key}.samples"
        if self.top_k is not None:
            yield "top_k", f"is for logits, and {key}.samples are tokens; remove it"
        read = self.temperature if self.teacher_temperature is None else self.teacher_temperature
        if set(StepSchedule.read(read).values) != {temperature}:
            yield "", f"its teacher's temperature must be {key}.temperature, {temperature:g}"

    def outputs(self, outputs: TeacherOutputs) -> Distribution:
        distribution = super().outputs(outputs)
        return distribution if self.top_k is None else distribution.largest(self.top_k)


@register("soft_kl", order=40)
@dataclass
class SoftKL(PredictionTermConfig):
    """T^2 KL(softmax(t / T) || softmax(s / T)) over the vocabulary (Hinton; DistilBERT; PKD)."""

    temperature: Temperature = 1.0
    positions: Annotated[
        str,
        OneOf(*POSITIONS),
        "The positions to compare. `attended`, as in DistilBERT's code, makes a small student "
        "two to three times as expensive.",
    ] = MASKED
    mean_over_labels: Annotated[
        bool, "Also divide by the size of the vocabulary, as PKD's code does."
    ] = False

    is_linear: ClassVar[bool] = True

    @property
    def reads_masked(self) -> bool:
        return self.positions == MASKED

    def factor(self, temperature: float, vocabulary: int) -> float:
        return temperature**2 / (vocabulary if self.mean_over_labels else 1)

    def loss(self, log_q: Tensor, log_p: Tensor, labels: Tensor) -> Tensor:
        return row_losses.kl_divergence(log_q, log_p)

    def target(self, teacher: Distribution, temperature: float) -> Target | None:
        return TeacherTarget(teacher, temperature)


@register("soft_cross_entropy", order=50)
@dataclass
class SoftCrossEntropy(PredictionTermConfig):
    """-softmax(t / T') . log softmax(s / T) at masked positions, without T^2.

    In TinyBERT (eq. 10), T' = T. C-MLM (arXiv 1911.03829) has T = 1, T' = 10, the 8 largest logits,
    and no mean over labels.
    """

    temperature: Temperature = 1.0
    teacher_temperature: Annotated[
        Setting | None, positive(1000.0), "T', which divides the teacher's logits; null: T."
    ] = None
    mean_over_labels: Annotated[
        bool, "Divide by the size of the vocabulary, as TinyBERT's code does."
    ] = True

    is_linear: ClassVar[bool] = True

    def factor(self, temperature: float, vocabulary: int) -> float:
        return 1 / vocabulary if self.mean_over_labels else 1.0

    def loss(self, log_q: Tensor, log_p: Tensor, labels: Tensor) -> Tensor:
        return soft_cross_entropy(log_q, log_p)


@register("blended", order=60)
@dataclass
class Blended(PredictionTermConfig):
    """-(a softmax(t) + (1 - a) onehot) . log softmax(s) at masked positions (MobileBERT).

    The pre-training distillation of arXiv 2004.02984, section 3.6, whose target mixes the label
    with the teacher's distribution.
    """

    min_lead: MinLead = field(default=None, kw_only=True)  # its target has the labels in it
    teacher_fraction: Annotated[
        float, FRACTION, "a: the weight of the teacher's distribution in the target."
    ] = 0.5

    is_linear: ClassVar[bool] = True

    def factor(self, temperature: float, vocabulary: int) -> float:
        return 1.0

    def loss(self, log_q: Tensor, log_p: Tensor, labels: Tensor) -> Tensor:
        soft = soft_cross_entropy(log_q, log_p)
        return torch.lerp(row_losses.cross_entropy(log_q, labels), soft, self.teacher_fraction)


def among(log_q: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities [C, V] among these tokens, bool [V]; elsewhere the logarithm of 0, -87."""
    floor = math.log(torch.finfo(log_q.dtype).tiny)
    return log_q.masked_fill(~tokens, ABSENT).log_softmax(dim=-1).clamp(min=floor)


def soft_cross_entropy(log_q: Tensor, log_p: Tensor) -> Tensor:
    """``-p . log q``."""
    return -row_losses.dot(log_p.exp(), log_q)


@register("from_student", order=180)
@dataclass
class FromStudent(DivergenceConfig):
    """T^2 KL(softmax(s / T) || softmax(t / T)) at masked positions (arXiv 2311.02849).

    s are the detached predictions of the `student`, made without dropout and with its weights from
    before the step; they cost one more forward pass of that student. The term is off before the
    student starts and once it is done.
    """

    student: Annotated[str, "The name of the student that the teacher learns from."] = field(
        kw_only=True
    )
    temperature: Temperature = 1.0

    @property
    def source(self) -> str | None:
        return student_key(self.student)

    def loss(self, log_q: Tensor, log_p: Tensor, labels: Tensor) -> Tensor:
        return row_losses.kl_divergence(log_q, log_p)

    def target(self, teacher: Distribution, temperature: float) -> Target | None:
        return TeacherTarget(teacher, temperature)
