"""Terms over the vocabulary: they share one projection per set of positions."""

from __future__ import annotations

from dataclasses import dataclass

from configs.bounds import positive, require_bounds, require_choice
from data_pipeline import MASKED
from model import ModelShape
from trainer.losses.rows import (
    RowLoss,
    blended_cross_entropy_rows,
    kl_divergence_rows,
    soft_cross_entropy_rows,
)
from trainer.objectives.step_schedule import Setting, StepSchedule
from trainer.objectives.term import (
    POSITIONS,
    LossInputs,
    TermConfig,
    VocabularyTerm,
    register,
    weigh_positions,
)

TEMPERATURE = positive(1000.0)


@dataclass
class VocabularyTermConfig(TermConfig):
    """The YAML section of a term over the vocabulary, at masked positions unless it says more."""

    @property
    def head(self) -> str | None:
        """See `TermConfig.head`."""
        return MASKED

    @property
    def reads_masked(self) -> bool:
        """See `TermConfig.reads_masked`."""
        return True

    @property
    def reads_states(self) -> bool:
        """See `TermConfig.reads_states`."""
        return not self.reads_masked


@register("soft_kl", order=40)
@dataclass
class SoftKL(VocabularyTermConfig):
    """T^2 KL(softmax(t / T) || softmax(s / T)) over the vocabulary (Hinton; DistilBERT; PKD).

    positions: masked, or attended as in DistilBERT's code by default, at two to three times a small
    student's cost. mean_over_labels divides by the size of the vocabulary too, as PKD's code does.
    """

    temperature: Setting = 1.0  # a number, or {step: value, ...}
    positions: str = MASKED
    mean_over_labels: bool = False

    def __post_init__(self) -> None:
        """Refuse temperatures that mean nothing, and unknown positions."""
        super().__post_init__()
        require_bounds(self, temperature=TEMPERATURE)
        require_choice(self, positions=POSITIONS)

    @property
    def reads_masked(self) -> bool:
        """See `TermConfig.reads_masked`."""
        return self.positions == MASKED

    def build(self, student: ModelShape, teacher: ModelShape) -> VocabularyTerm:
        """See `TermConfig.build`."""
        _require_one_vocabulary(student, teacher)
        return SoftTargetsTerm(self, student.vocab_size)


class SoftTargetsTerm(VocabularyTerm):
    """See `SoftKL`."""

    reads_logits = True

    def __init__(self, config: SoftKL, vocabulary: int) -> None:
        super().__init__(config)
        self.denominator = config.positions
        self.temperature = StepSchedule.read(config.temperature, "temperature")
        self.divisor = vocabulary if config.mean_over_labels else 1

    def row_loss(self, inputs: LossInputs) -> RowLoss:
        """See `VocabularyTerm.row_loss`."""
        temperature = self.temperature.at(inputs.step)
        weights = weigh_positions(inputs, self.denominator) * (temperature**2 / self.divisor)
        return kl_divergence_rows(
            self.outputs(inputs).distributions[self.denominator], temperature, weights
        )


@register("soft_cross_entropy", order=50)
@dataclass
class SoftCrossEntropy(VocabularyTermConfig):
    """-softmax(t / T) . log softmax(s / T), no T^2 (TinyBERT's prediction layer, eq. 10).

    At masked positions. mean_over_labels, as in its code, divides by the size of the vocabulary.
    """

    temperature: Setting = 1.0  # a number, or {step: value, ...}
    mean_over_labels: bool = True

    def __post_init__(self) -> None:
        """Refuse temperatures that mean nothing."""
        super().__post_init__()
        require_bounds(self, temperature=TEMPERATURE)

    def build(self, student: ModelShape, teacher: ModelShape) -> VocabularyTerm:
        """See `TermConfig.build`."""
        _require_one_vocabulary(student, teacher)
        return PredictionTerm(self, student.vocab_size)


class PredictionTerm(VocabularyTerm):
    """See `Prediction`."""

    denominator = MASKED
    reads_logits = True

    def __init__(self, config: SoftCrossEntropy, vocabulary: int) -> None:
        super().__init__(config)
        self.temperature = StepSchedule.read(config.temperature, "temperature")
        self.divisor = vocabulary if config.mean_over_labels else 1

    def row_loss(self, inputs: LossInputs) -> RowLoss:
        """See `VocabularyTerm.row_loss`."""
        temperature = self.temperature.at(inputs.step)
        weights = weigh_positions(inputs, MASKED) / self.divisor
        return soft_cross_entropy_rows(
            self.outputs(inputs).distributions[MASKED], temperature, weights
        )


@register("blended", order=60)
@dataclass
class Blended(VocabularyTermConfig):
    """-(a softmax(t) + (1 - a) onehot) . log softmax(s) at masked positions (MobileBERT).

    Pre-training distillation of arXiv 2004.02984, section 3.6: the label is mixed with the
    teacher's distribution.
    """

    teacher_fraction: float = 0.5

    def __post_init__(self) -> None:
        """Refuse shares that are none."""
        super().__post_init__()
        require_bounds(self, teacher_fraction=(0.0, 1.0))

    def build(self, student: ModelShape, teacher: ModelShape) -> VocabularyTerm:
        """See `TermConfig.build`."""
        _require_one_vocabulary(student, teacher)
        return BlendedTerm(self)


class BlendedTerm(VocabularyTerm):
    """See `Blended`."""

    denominator = MASKED
    reads_logits = True

    def __init__(self, config: Blended) -> None:
        super().__init__(config)
        self.teacher_fraction = config.teacher_fraction

    def row_loss(self, inputs: LossInputs) -> RowLoss:
        """See `VocabularyTerm.row_loss`."""
        teacher = self.outputs(inputs).distributions[MASKED]
        return blended_cross_entropy_rows(
            teacher, inputs.batch.targets[MASKED].labels, self.teacher_fraction
        )


def _require_one_vocabulary(student: ModelShape, teacher: ModelShape) -> None:
    if student.vocab_size != teacher.vocab_size:
        raise ValueError("student and teacher must share a vocabulary")
