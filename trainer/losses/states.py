"""Losses between states: pure functions that return (sum, count).

The caller divides by the count summed over all ranks and micro-batches. The sum already contains
the mean over constant sizes (the hidden width), so the counts are those of `trainer.denominators`.
Sums are float32 scalars. Losses of predictions about examples are in `trainer.losses.labels`,
those over the vocabulary in `trainer.losses.vocabulary`, and those between attention matrices in
`trainer.losses.relations`.

Shapes: B rows, L positions, H hidden width. [..., H] with a mask [...] stands for [B, L, H] with
attended positions, or [P, H] with masked positions. Masks are bool.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


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
