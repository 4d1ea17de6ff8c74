"""Losses of predictions about examples: pure functions that return (sum, count).

They compare with labels, or with what teachers predict.

The caller divides by the count summed over all ranks and micro-batches. Sums are float32 scalars.

Shapes: B rows, N choices, K classes. Losses over the vocabulary are in `trainer.losses.vocabulary`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline import NO_LABEL


def label_cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of one class per row.

    For classifiers, next-sentence prediction (BERT, arXiv 1810.04805; label 0: the segment follows)
    and sentence-order prediction (ALBERT, arXiv 1909.11942; label 0: the right order).

    logits: [B, classes]; labels: [B] int64, -100 where a row has none; weights: of each class.
    Count: labelled rows, or the sum of their weights, as torch's CrossEntropyLoss has it.
    """
    if weights is not None:
        weights = weights.float()
    loss = F.cross_entropy(logits.float(), labels, weights, ignore_index=NO_LABEL, reduction="sum")
    there = labels != NO_LABEL
    return loss, there.sum() if weights is None else (weights[labels.clamp(min=0)] * there).sum()


def binary_cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of labels that are right (1) or wrong (0), each by itself.

    logits: [B, K]; labels: [B, K] int64, -100 where a row has none; weights: of each label.
    Count: decisions, as torch's BCEWithLogitsLoss has it, or the sum of their weights.
    """
    there = (labels != NO_LABEL).expand(logits.shape).float()
    if weights is not None:
        there = there * weights.float()
    right = labels.clamp(min=0).expand(logits.shape).float()
    loss = F.binary_cross_entropy_with_logits(logits.float(), right, there, reduction="sum")
    return loss, there.sum()


def squared_error(predictions: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error of one predicted number per example.

    predictions: [B, 1]; numbers: [B] float32, NaN where an example has none. Count: numbers.
    """
    there = ~numbers.isnan()
    error = predictions.float()[:, 0] - torch.where(there, numbers, 0.0)
    return (error.square() * there).sum(), there.sum()


def soft_label_loss(
    student: Tensor, teachers: Sequence[Tensor], weights: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """T^2 * KL(mean of softmax(teacher / T) || softmax(student / T)), of one teacher or several.

    For numbers, the squared difference from the teachers' mean. Hinton et al., arXiv 1503.02531.
    student, each teacher: logits [N, K], large and negative for a class that is ruled out, or
    numbers [N, 1]; weights: [N], 0 where a row does not count. Count: the sum of the weights.
    """
    ours, theirs = student.float(), torch.stack([one.float() for one in teachers])
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
    ours, theirs = student.float(), torch.stack([one.float() for one in teachers])
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


def branch_divergence(
    branches: Tensor, last: Tensor, weights: Tensor, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """The sum over branches of KL(last || branch), or with `reverse` of KL(branch || last).

    FastBERT, arXiv 2004.02178, eq. 8 and 9; the order of its code and that of its paper.
    branches: logits [branches, B, K]; last: logits [B, K]; weights: [B], 0 where a row does not
    count. Count: the sum of the weights.
    """
    ours = F.log_softmax(branches.float(), dim=-1)
    theirs = F.log_softmax(last.float(), dim=-1).expand_as(ours)
    said, target = (theirs, ours) if reverse else (ours, theirs)
    losses = F.kl_div(said, target, reduction="none", log_target=True).sum(dim=-1)
    return (losses * weights).sum(), weights.sum()


def logit_squared_error(
    student: Tensor, teachers: Sequence[Tensor], weights: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """|s - t|^2 of the logits, or numbers, of student and teacher, or of the teachers' mean.

    Tang et al., arXiv 1903.12136, eq. 3. Arguments and count as for `soft_label_loss`; the
    temperature has no part in it.
    """
    mean = torch.stack([one.float() for one in teachers]).mean(dim=0)
    losses = (student.float() - mean).square().sum(dim=1)
    return (losses * weights).sum(), weights.sum()
