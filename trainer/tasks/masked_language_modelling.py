"""Masked language modelling: predict the masked tokens (BERT, arXiv 1810.04805)."""

from dataclasses import dataclass

from data_pipeline import MASKED
from model import ModelShape
from trainer.objectives.row_losses import RowLoss, cross_entropy_rows
from trainer.objectives.term import LossInputs, register
from trainer.objectives.terms.predictions import VocabularyTermConfig
from trainer.objectives.vocabulary import VocabularyTerm


@register("mlm", order=10)
@dataclass
class MaskedLanguageModelling(VocabularyTermConfig):
    """Cross-entropy at masked positions (BERT, arXiv 1810.04805), or of next tokens."""

    def build(self, student: ModelShape, teacher: ModelShape) -> VocabularyTerm:
        return MaskedLanguageModellingTerm(self)


class MaskedLanguageModellingTerm(VocabularyTerm):
    denominator = MASKED

    def row_loss(self, inputs: LossInputs) -> RowLoss:
        return cross_entropy_rows(inputs.batch.targets[MASKED].labels)
