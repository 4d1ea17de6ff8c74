"""Terms that compare predictions with a teacher's by other divergences than KL(teacher || student).

Losses are functions of log-probabilities, as in `trainer.objectives.row_losses`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from configs.rules import WEIGHT, Range, positive
from configs.section import Refusal
from model import ModelShape
from trainer.objectives.row_losses import kl_divergence
from trainer.objectives.term import register
from trainer.objectives.terms.predictions import PredictionTermConfig, Temperature
from trainer.stored_logits.format import StoredConfig
from trainer.vocabulary_projection import ABSENT


@register("reverse_kl", order=62)
@dataclass
class ReverseKL(PredictionTermConfig):
    """T^2 KL(softmax(s / T) || softmax(t / T)) at masked positions (MiniLLM, arXiv 2306.08543)."""

    temperature: Temperature = 1.0

    needs_all_logits: ClassVar[bool] = True

    def loss(self, log_q: Tensor, log_p: Tensor, labels: Tensor) -> Tensor:
        return kl_divergence(log_p, log_q)


@register("jensen_shannon", order=63)
@dataclass
class JensenShannon(PredictionTermConfig):
    """T^2 (b KL(p || m) + (1 - b) KL(q || m)), m = b p + (1 - b) q, at masked positions.

    p = softmax(t / T), q = softmax(s / T). Generalised as in GKD (arXiv 2306.13649).
    """

    temperature: Temperature = 1.0
    teacher_fraction: Annotated[
        float, Range(1e-6, 1 - 1e-6), "b: the weight of p in the mixture."
    ] = 0.5

    def loss(self, log_q: Tensor, log_p: Tensor, labels: Tensor) -> Tensor:
        return jensen_shannon(log_q, log_p, self.teacher_fraction)


@register("decoupled_kd", order=64)
@dataclass
class DecoupledKD(PredictionTermConfig):
    """T^2 times the KL of label against rest, and of the rest alone (arXiv 2203.08679, eq. 7)."""

    temperature: Temperature = 1.0
    label_weight: Annotated[float, WEIGHT, "Alpha: of label against rest."] = 1.0
    rest_weight: Annotated[float, WEIGHT, "Beta: among the rest."] = 8.0

    def misfits(self, student: ModelShape, teacher: ModelShape) -> Iterator[Refusal]:
        yield from super().misfits(student, teacher)
        if self.top_k == 1:
            yield "top_k", "must be 2 or more: it compares what is beside the label"

    def misfits_with_stored(self, key: str, stored: StoredConfig) -> Iterator[Refusal]:
        yield from super().misfits_with_stored(key, stored)
        if stored.samples is None and stored.top_k == 1:
            yield "", f"compares what is beside the label, so {key}.top_k must be 2 or more"

    def loss(self, log_q: Tensor, log_p: Tensor, labels: Tensor) -> Tensor:
        return decoupled(log_q, log_p, labels, self.label_weight, self.rest_weight)


@register("alpha_beta", order=65)
@dataclass
class AlphaBeta(PredictionTermConfig):
    """T^2 times the alpha-beta divergence at masked positions (ABKD, arXiv 2505.04560)."""

    temperature: Temperature = 1.0
    alpha: Annotated[float, positive(10.0), "Power of the teacher's probabilities."] = 0.5
    beta: Annotated[float, positive(10.0), "Power of the student's."] = 0.5

    def loss(self, log_q: Tensor, log_p: Tensor, labels: Tensor) -> Tensor:
        return alpha_beta(log_q, log_p, self.alpha, self.beta)


@register("uld", order=66)
@dataclass
class UniversalLogitDistillation(PredictionTermConfig):
    """|sort(softmax(s)) - sort(softmax(t))|_1 at masked positions (ULD, arXiv 2402.12030, eq. 5).

    The probabilities are compared by rank, whatever tokens they are of, so that student and teacher
    need no vocabulary in common. The smaller vocabulary has more tokens of probability 0.
    """

    needs_all_logits: ClassVar[bool] = True
    any_vocabulary: ClassVar[bool] = True

    def loss(self, log_q: Tensor, log_p: Tensor, labels: Tensor) -> Tensor:
        return sorted_distance(log_q, log_p)


def sorted_distance(log_q: Tensor, log_p: Tensor) -> Tensor:
    """``|sort(q) - sort(p)|_1`` of vocabularies of any sizes (ULD, arXiv 2402.12030)."""
    q, p = (logs.exp().sort(dim=-1, descending=True).values for logs in (log_q, log_p))
    size = max(q.shape[-1], p.shape[-1])
    q, p = (F.pad(values, (0, size - values.shape[-1])) for values in (q, p))
    return (q - p).abs().sum(dim=-1)


def jensen_shannon(log_q: Tensor, log_p: Tensor, share: float) -> Tensor:
    """``b KL(p || m) + (1 - b) KL(q || m)``, m = b p + (1 - b) q (GKD, arXiv 2306.13649)."""
    log_m = torch.logaddexp(log_p + math.log(share), log_q + math.log1p(-share))
    return share * kl_divergence(log_m, log_p) + (1 - share) * kl_divergence(log_m, log_q)


def alpha_beta(log_q: Tensor, log_p: Tensor, alpha: float, beta: float) -> Tensor:
    """Cichocki's divergence (ABKD, arXiv 2505.04560); alpha, beta > 0.

    ``-1/(ab) sum(p^a q^b - a/(a + b) p^(a + b) - b/(a + b) q^(a + b))``.
    """
    both = alpha + beta
    mixed = (alpha * log_p + beta * log_q).exp().sum(dim=-1)
    theirs, ours = ((both * logs).exp().sum(dim=-1) for logs in (log_p, log_q))
    return (alpha / both * theirs + beta / both * ours - mixed) / (alpha * beta)


def decoupled(
    log_q: Tensor, log_p: Tensor, labels: Tensor, label_weight: float, rest_weight: float
) -> Tensor:
    """KL of label against rest, and KL among the rest (decoupled KD, arXiv 2203.08679, eq. 7)."""
    at = labels.clamp(min=0)[:, None]
    (label_q, rest_q, sum_q), (label_p, rest_p, sum_p) = (
        (logs.gather(1, at), rest := logs.scatter(1, at, ABSENT), rest.logsumexp(1, keepdim=True))
        for logs in (log_q, log_p)
    )
    pair = kl_divergence(torch.cat([label_q, sum_q], 1), torch.cat([label_p, sum_p], 1))
    return label_weight * pair + rest_weight * kl_divergence(rest_q - sum_q, rest_p - sum_p)
