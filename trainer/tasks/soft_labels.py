"""Soft labels: a student's task head learns from the predictions of the teacher's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from configs.rules import Doc, positive
from configs.section import Refusal
from model import Ability, Capture, ModelShape
from trainer.losses.states import soft_label_loss
from trainer.objectives.task import TaskConfig
from trainer.objectives.term import LossInputs, Term, TermConfig, register, registered_terms


@register("soft_labels")
@dataclass
class SoftLabels(TermConfig):
    """T^2 * KL(teacher || student) of a task's head; the squared difference where it is a number.

    Hinton et al., arXiv 1503.02531. The mean over the labelled examples, or words. The objective
    must contain the task too, whose weight may be 0.
    """

    temperature: Annotated[
        float, positive(1e3), Doc("T, which divides the logits of teacher and student.")
    ] = 1.0
    task: Annotated[str, Doc("The task whose head learns; empty: the job's task.")] = ""

    needs = (Ability.TASK_HEAD,)

    def conflicts(self) -> Iterator[Refusal]:
        yield from super().conflicts()
        if self.task and not issubclass(registered_terms().get(self.task, TermConfig), TaskConfig):
            yield "task", f"{self.task} is not a task"

    @property
    def head(self) -> str | None:
        return self.task or None

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return SoftLabelsTerm(self)


class SoftLabelsTerm(Term):
    def __init__(self, config: SoftLabels) -> None:
        super().__init__(config)
        self.head = self.denominator = config.task
        self.temperature = config.temperature
        self.task = registered_terms().get(config.task)

    def student_capture(self, step: int) -> Capture:
        return Capture(heads=(self.head,))

    def source_capture(self, step: int) -> Capture:
        return Capture(heads=(self.head,))

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        assert self.task is not None
        assert issubclass(self.task, TaskConfig)
        ours, weights = self.task.choices(inputs.features.heads[self.head], inputs.batch)
        theirs, _ = self.task.choices(self.outputs(inputs).heads[self.head], inputs.batch)
        return soft_label_loss(ours, theirs, weights, self.temperature)
