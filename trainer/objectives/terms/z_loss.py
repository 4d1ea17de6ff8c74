"""A term that keeps the logits over the vocabulary near zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from data_pipeline import MASKED
from model import ModelShape
from trainer.objectives.row_losses import RowLoss
from trainer.objectives.term import LossInputs, Weight, register
from trainer.objectives.terms.predictions import VocabularyTermConfig
from trainer.objectives.vocabulary import VocabularyTerm, weigh_positions


@register("z_loss", order=185)
@dataclass
class ZLoss(VocabularyTermConfig):
    """``log(Z)^2`` at masked positions, Z the sum of the exponentials of the logits.

    It keeps the softmax's normaliser near 1, where 16 bits are precise and training is stable
    (PaLM, arXiv 2204.02311, section 5; Chameleon, arXiv 2405.09818).
    """

    regularises: ClassVar[bool] = True

    weight: Weight = 1e-4

    def build(self, student: ModelShape, teacher: ModelShape) -> VocabularyTerm:
        return ZLossTerm(self)


class ZLossTerm(VocabularyTerm):
    denominator = MASKED

    def row_loss(self, inputs: LossInputs) -> RowLoss:
        return RowLoss(squared_log_z, weigh_positions(inputs, MASKED), of_logits=True)


def squared_log_z(logits: Tensor) -> Tensor:
    """``log(sum exp logits)^2`` of each row: [C, V] to [C]."""
    return logits.logsumexp(dim=-1).square()
