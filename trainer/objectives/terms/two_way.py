"""Two-way distillation: a term by which the teacher learns from a student."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from configs.rules import Doc
from data_pipeline import MASKED
from model import ModelShape
from trainer.learner_names import student_key
from trainer.losses.rows import RowLoss, kl_divergence_rows
from trainer.objectives.step_schedule import StepSchedule
from trainer.objectives.term import LossInputs, VocabularyTerm, register, weigh_positions
from trainer.objectives.terms.vocabulary import Temperature, VocabularyTermConfig


@register("from_student", order=180)
@dataclass
class FromStudent(VocabularyTermConfig):
    """T^2 KL(softmax(s / T) || softmax(t / T)) at masked positions (arXiv 2311.02849).

    s are the detached predictions of the `student`, made without dropout and with its weights from
    before the step; they cost one more forward pass of that student. The term is off before the
    student starts and once it is done.
    """

    student: Annotated[str, Doc("The name of the student that the teacher learns from.")] = field(
        kw_only=True
    )
    temperature: Temperature = 1.0

    @property
    def source(self) -> str | None:
        return student_key(self.student)

    def build(self, student: ModelShape, teacher: ModelShape) -> VocabularyTerm:
        return FromStudentTerm(self)


class FromStudentTerm(VocabularyTerm):
    denominator = MASKED
    reads_logits = True

    def __init__(self, config: FromStudent) -> None:
        super().__init__(config)
        self.temperature = StepSchedule.read(config.temperature)

    def row_loss(self, inputs: LossInputs) -> RowLoss:
        temperature = self.temperature.at(inputs.step)
        weights = weigh_positions(inputs, MASKED) * temperature**2
        return kl_divergence_rows(self.outputs(inputs).distributions[MASKED], temperature, weights)
