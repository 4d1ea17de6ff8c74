"""A teacher that learns from a student too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from configs.bounds import require_bounds
from model import EncoderConfig
from model.row_losses import RowLoss, kl_divergence_rows
from trainer.objectives.over_steps import OverSteps, Setting
from trainer.objectives.term import MASKED, Lesson, VocabularyTerm, weigh_positions
from trainer.objectives.terms.vocabulary import TEMPERATURE, VocabularyTermConfig


@dataclass
class FromStudent(VocabularyTermConfig):
    """T^2 KL(softmax(s / T) || softmax(t / T)) at masked positions (arXiv 2311.02849).

    s are the detached predictions of the `student` with the weights that it has before the step,
    without dropout: they cost one more forward pass of it. Off before it starts and once it is
    done.
    """

    from_teacher: ClassVar[bool] = False
    student: str = ""
    temperature: Setting = 1.0  # a number, or {step: value, ...}

    def __post_init__(self) -> None:
        """Refuse temperatures that mean nothing."""
        super().__post_init__()
        require_bounds(self, temperature=TEMPERATURE)

    def build(self, student: EncoderConfig, teacher: EncoderConfig) -> VocabularyTerm:
        """See `TermConfig.build`."""
        return FromStudentTerm(self)


class FromStudentTerm(VocabularyTerm):
    """See `FromStudent`. The lesson's knowledge is the student's."""

    unit = MASKED

    def __init__(self, config: FromStudent) -> None:
        super().__init__(config)
        self.temperature = OverSteps.read(config.temperature, "temperature")

    def applies(self, lesson: Lesson) -> bool:
        """See `Term.applies`."""
        return lesson.knowledge is not None

    def row_loss(self, lesson: Lesson) -> RowLoss:
        """See `VocabularyTerm.row_loss`."""
        temperature = self.temperature.at(lesson.step)
        weights = weigh_positions(lesson, MASKED) * temperature**2
        return kl_divergence_rows(lesson.teacher.distributions[MASKED], temperature, weights)
