"""Losses between states and over pair logits: pure functions that return (sum, count).

The caller divides by the count summed over all ranks and micro-batches. The sum already contains
the mean over constant sizes (the hidden width), so the counts are those of `trainer.batches`. Sums
are float32 scalars. Losses over the vocabulary are in `trainer.losses.vocabulary`, those between
attention matrices in `trainer.losses.relations`.

Shapes: B rows, L positions, H hidden width. [..., H] with a mask [...] stands for [B, L, H] with
attended positions, or [P, H] with masked positions. Masks are bool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline import NO_LABEL


def label_cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of one class per row.

    For classifiers, next-sentence prediction (BERT, arXiv 1810.04805; label 0: the segment follows)
    and sentence-order prediction (ALBERT, arXiv 1909.11942; label 0: the right order).

    logits: [B, classes]; labels: [B] int64, -100 where a row has none. Count: labelled rows.
    """
    loss = F.cross_entropy(logits.float(), labels, ignore_index=NO_LABEL, reduction="sum")
    return loss, (labels != NO_LABEL).sum()


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


def cosine_distance(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """1 - cos(student, teacher) (DistilBERT, arXiv 1910.01108, section 3).

    student, teacher: [..., H]; mask: [...]. Count: positions in the mask.
    """
    distance = 1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1)
    return _masked_sum(distance, mask)


def hidden_mse(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """|student - teacher|^2 / H (TinyBERT, arXiv 1909.10351, eq. 8; eq. 9 for embeddings).

    student, teacher: [..., H]; mask: [...]. Count: positions in the mask. The original code divides
    by B * L, padding included; without padding both are the same.
    """
    return _masked_sum((student.float() - teacher.float()).square().mean(dim=-1), mask)


def patient_mse(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """|s / |s| - t / |t||^2 / H of [CLS] states (PKD, arXiv 1908.09355, eq. 7; H as in its code).

    student, teacher: [B, H]; mask: [B]. Count: rows in the mask.
    """
    ours, theirs = F.normalize(student.float(), dim=-1), F.normalize(teacher.float(), dim=-1)
    return _masked_sum((ours - theirs).square().mean(dim=-1), mask)


def feature_map_mse(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """|norm(s) - norm(t)|^2 / H, norm being layer normalisation without weights (MobileBERT).

    Feature map transfer, arXiv 2004.02984, eq. 1, on normalised states as in its code.
    student, teacher: [..., H]; mask: [...]. Count: positions in the mask.
    """
    ours, theirs = (F.layer_norm(x.float(), x.shape[-1:], eps=1e-12) for x in (student, teacher))
    return _masked_sum((ours - theirs).square().mean(dim=-1), mask)


def mean_difference(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(mean(s) - mean(t))^2 of the means over the width (MobileBERT's code, beta).

    student: [..., H]; teacher: [..., H']; mask: [...]. Count: positions in the mask. The original
    code mistakenly averages over all of the teacher's layers; this uses the layer's own mean.
    """
    difference = student.float().mean(dim=-1) - teacher.float().mean(dim=-1)
    return _masked_sum(difference.square(), mask)


def variance_difference(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """|var(s) - var(t)| of the variances over the width (MobileBERT's code, gamma).

    Arguments, count and remark as for `mean_difference`. Where layer norms make both variances 1,
    rounding decides the sign of the difference, and so the sign of the gradient.
    """
    ours, theirs = (x.float().var(dim=-1, correction=0) for x in (student, teacher))
    return _masked_sum((ours - theirs).abs(), mask)


def _masked_sum(losses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return (losses * mask).sum(), mask.sum()
