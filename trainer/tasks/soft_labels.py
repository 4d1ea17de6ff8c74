"""Soft labels: a student's task head learns from the predictions of the teacher's."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from configs.rules import WEIGHT, OneOf, positive
from configs.section import Refusal
from model import SPAN, ModelConfig, ModelShape
from trainer.objectives.task import HeadTerm, HeadTermConfig, TaskConfig
from trainer.objectives.term import LossInputs, TeacherTermConfig, Term, TermConfig, register

KL, CROSS_ENTROPY, MSE = "kl", "cross_entropy", "mse"


def soft_label_loss(
    student: Tensor, teachers: Sequence[Tensor], weights: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """T^2 * KL(mean of softmax(teacher / T) || softmax(student / T)), of one teacher or several.

    For numbers, the squared difference from the teachers' mean. Hinton et al., arXiv 1503.02531.
    student, each teacher: logits [N, K], large and negative for a class that is ruled out, or
    numbers [N, 1]; weights: [N], 0 where a row does not count. Count: the sum of the weights.
    """
    ours, theirs = student.float(), torch.stack([teacher.float() for teacher in teachers])
    if ours.shape[1] == 1:
        losses = (ours - theirs.mean(dim=0)).square().sum(dim=1)
    else:
        each = F.log_softmax(theirs / temperature, dim=2)
        target = each.logsumexp(dim=0) - math.log(len(teachers))
        ours = F.log_softmax(ours / temperature, dim=1)
        losses = F.kl_div(ours, target, reduction="none", log_target=True).sum(dim=1)
        losses = losses * temperature**2
    return (losses * weights).sum(), weights.sum()


def soft_label_cross_entropy(
    student: Tensor, teachers: Sequence[Tensor], weights: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """-softmax(teacher / T) . log softmax(student / T), or with several teachers their mean.

    TinyBERT, arXiv 1909.10351, eq. 10, without T^2. Of a number, the squared difference. Arguments
    and count as for `soft_label_loss`.
    """
    if student.shape[1] == 1:
        return soft_label_loss(student, teachers, weights, temperature)
    ours, theirs = student.float(), torch.stack([teacher.float() for teacher in teachers])
    target = F.softmax(theirs / temperature, dim=2).mean(dim=0)
    losses = -(target * F.log_softmax(ours / temperature, dim=1)).sum(dim=1)
    return (losses * weights).sum(), weights.sum()


def first_choice_cross_entropy(
    student: Tensor, teachers: Sequence[Tensor], weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the label that the teachers' mean probability makes the first choice.

    Tang et al.'s code labels its transfer set by the teacher. Arguments and count as for
    `soft_label_loss`; a number has no first choice.
    """
    theirs = torch.stack([logits.float() for logits in teachers])
    labels = F.softmax(theirs, dim=2).mean(dim=0).argmax(dim=1)
    losses = F.cross_entropy(student.float(), labels, reduction="none")
    return (losses * weights).sum(), weights.sum()


def logit_squared_error(
    student: Tensor, teachers: Sequence[Tensor], weights: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """|s - t|^2 of the logits, or numbers, of student and teacher, or of the teachers' mean.

    Tang et al., arXiv 1903.12136, eq. 3. Arguments and count as for `soft_label_loss`; the
    temperature has no part in it.
    """
    mean = torch.stack([teacher.float() for teacher in teachers]).mean(dim=0)
    losses = (student.float() - mean).square().sum(dim=1)
    return (losses * weights).sum(), weights.sum()


SOFT_LABEL_LOSSES = {
    KL: soft_label_loss,
    CROSS_ENTROPY: soft_label_cross_entropy,
    MSE: logit_squared_error,
}


@register("soft_labels")
@dataclass
class SoftLabels(HeadTermConfig, TeacherTermConfig):
    """A loss between the predictions of a task's head and the teacher's: soft labels.

    For a number the loss is the squared difference. It is the mean over the labelled examples, or
    words. The objective must also contain the task, whose weight may be 0. With several tasks there
    is a term for each.
    """

    loss: Annotated[
        str,
        OneOf(*SOFT_LABEL_LOSSES),
        "kl: T^2 * KL(teacher || student) (Hinton et al., arXiv 1503.02531; PKD). "
        "cross_entropy: -softmax(t / T) . log softmax(s / T), without T^2 (TinyBERT). "
        "mse: |t - s|^2 of the logits (Tang et al., arXiv 1903.12136).",
    ] = KL
    temperature: Annotated[
        float,
        positive(1e3),
        "T, which divides the logits of teacher and student; numbers have none.",
    ] = 1.0
    mean_over_labels: Annotated[
        bool, "Also divide by the number of labels, as the originals' code does."
    ] = False

    first_choice: Annotated[
        float,
        WEIGHT,
        "Add this times the cross-entropy of the label that the teacher finds most probable "
        "(the ce_lambda of Tang et al.'s code).",
    ] = 0.0

    reads_states: ClassVar[bool] = False

    def conflicts(self) -> Iterator[Refusal]:
        yield from super().conflicts()
        if self.loss == MSE and self.temperature != 1.0:
            yield "temperature", "has no part in mse; remove it"

    def conflicts_with_task(self, task: TaskConfig) -> Iterator[Refusal]:
        if task.predicts_a_number and self.first_choice:
            yield "first_choice", "a number has no labels; remove it"

    def unequippable(self, model: ModelConfig) -> Iterator[str]:
        yield from super().unequippable(model)
        head = model.task_heads.get(self.head or "")
        if self.mean_over_labels and head is not None and head.kind == SPAN:
            yield "mean_over_labels: a span has no labels, and texts have other lengths; remove it"

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return SoftLabelsTerm(self)


class SoftLabelsTerm(HeadTerm):
    def __init__(self, config: SoftLabels) -> None:
        super().__init__(config)
        self.denominator = self.head
        self.loss = SOFT_LABEL_LOSSES[config.loss]
        self.temperature, self.mean_over_labels = config.temperature, config.mean_over_labels
        self.first_choice = config.first_choice

    def stand_beside(self, terms: Mapping[str, TermConfig]) -> None:
        tasks = (term for term in terms.values() if isinstance(term, TaskConfig))
        self.task = next(task for task in tasks if task.head == self.head)

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        ours, weights = self.task.choices(inputs.features.heads[self.head], inputs.batch)
        heads = self.outputs(inputs).heads[self.head]
        theirs = [self.task.choices(logits, inputs.batch)[0] for logits in heads]
        loss, count = self.loss(ours, theirs, weights, self.temperature)
        loss = loss / ours.shape[1] if self.mean_over_labels else loss
        if self.first_choice:
            loss = loss + self.first_choice * first_choice_cross_entropy(ours, theirs, weights)[0]
        return loss, count
