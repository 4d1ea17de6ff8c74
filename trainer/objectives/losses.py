"""Distillation losses between captured states: pure functions that return (sum, count).

The caller divides by the count summed over all ranks and micro-batches. Constant sizes (hidden
width, heads, layers) are averaged inside the sum, so the counts are those of `trainer.batches`.
Sums are float32 scalars. The losses over the vocabulary are in `model.vocabulary_loss`.

Shapes: B rows, L positions, H hidden width, A heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from model import QKV

# Scores of one chunk of rows, float32, for student and teacher together.
SCORE_BYTES = 64 * 2**20


def cosine_distance(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """1 - cos(student, teacher) at attended positions (DistilBERT, arXiv 1910.01108, section 3).

    student, teacher: [B, L, H]; mask: [B, L] bool. Count: attended positions.
    """
    distance = 1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1)  # [B, L]
    return (distance * mask).sum(), mask.sum()


def hidden_mse(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error of hidden states, averaged over the width (TinyBERT, arXiv 1909.10351, eq. 8).

    student, teacher: [B, L, H]; mask: [B, L] bool. Count: attended positions.
    """
    error = (student.float() - teacher.float()).square().mean(dim=-1)  # [B, L]
    return (error * mask).sum(), mask.sum()


def attention_mse(student: QKV, teacher: QKV, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error of pre-softmax scores, averaged over heads (TinyBERT, eq. 7, its code's form).

    The original compares scores and zeroes masked ones; here pairs with padding do not count.
    Queries and keys are [B, A, L, D]; head widths may differ, the number of heads must not.
    mask: [B, L] bool. Count: pairs of attended positions in a row. Scores live a few rows at a
    time in the forward pass.
    """
    rows, heads, length, _ = student.q.shape
    size = max(1, SCORE_BYTES // (2 * 4 * heads * length * length))
    total = student.q.new_zeros((), dtype=torch.float32)
    for begin in range(0, rows, size):
        chunk = slice(begin, begin + size)
        pairs = mask[chunk, :, None] & mask[chunk, None, :]  # [b, L, L]
        error = _scores(student, chunk) - _scores(teacher, chunk)  # [b, A, L, L]
        total = total + (error.square().mean(dim=1) * pairs).sum()
    lengths = mask.sum(dim=1)
    return total, lengths.square().sum()


def _scores(qkv: QKV, chunk: slice) -> Tensor:
    """Scaled dot products of a chunk of rows, [b, A, L, L] float32."""
    queries, keys = qkv.q[chunk].float(), qkv.k[chunk].float()
    return queries @ keys.transpose(-1, -2) * queries.shape[-1] ** -0.5
