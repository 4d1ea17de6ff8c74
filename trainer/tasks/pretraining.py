"""Pre-training on text: masked tokens, pairs of segments, and replaced tokens.

BERT (arXiv 1810.04805) predicts masked tokens, and whether the second segment follows the first;
ALBERT (arXiv 1909.11942) whether two segments were swapped; ELECTRA (arXiv 2003.10555) which tokens
are a generator's samples.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from data_pipeline import MASKED, NO_LABEL
from model import DETECTION, Ability, Capture, ModelConfig, ModelShape, TaskHeadConfig
from model.hugging_face.conversion import with_task_head
from trainer.denominators import ATTENDED
from trainer.objectives.labels import PairConfig, binary_cross_entropy
from trainer.objectives.row_losses import RowLoss, cross_entropy_rows
from trainer.objectives.term import LossInputs, Term, TermConfig, register
from trainer.objectives.terms.predictions import VocabularyTermConfig
from trainer.objectives.vocabulary import VocabularyTerm
from trainer.replaced_tokens import REPLACED


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


@register("nsp", order=20)
@dataclass
class NextSentence(PairConfig):
    """Whether the second segment follows the first (BERT). The mean over labelled pairs."""

    packings: ClassVar[tuple[str, ...]] = ("segment_pair", "sentence_pair")


@register("sop", order=30)
@dataclass
class SentenceOrder(PairConfig):
    """Whether two consecutive segments are in order (ALBERT). The mean over labelled pairs."""

    packings: ClassVar[tuple[str, ...]] = ("sop",)


@register("rtd", order=35)
@dataclass
class ReplacedTokenDetection(TermConfig):
    """Binary cross-entropy at every token: is it a sample of the learner's `generator`?

    ELECTRA (arXiv 2003.10555) has a weight of 50. The loss is the mean over all tokens, masked or
    not.
    """

    needs: ClassVar[tuple[Ability, ...]] = (Ability.TASK_HEAD,)
    head: ClassVar[str] = REPLACED
    reads_all_positions: ClassVar[bool] = True

    def refusals(self, packings: Collection[str], masked: bool) -> Iterator[str]:
        if not masked:
            yield "needs masked tokens to replace, but data.masking.rate is 0"

    def equip(self, model: ModelConfig) -> ModelConfig:
        head = TaskHeadConfig(DETECTION, transform="gelu", dropout=0.0)
        return with_task_head(model, REPLACED, head)

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return ReplacedTokenDetectionTerm(self)


class ReplacedTokenDetectionTerm(Term):
    denominator = ATTENDED

    def student_capture(self, step: int) -> Capture:
        return Capture(heads=(REPLACED,))

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        batch = inputs.batch
        labels = batch.targets[REPLACED].labels.clamp(min=0)  # a row without masks is original
        labels = torch.where(batch.attention_mask.flatten(), labels, NO_LABEL)
        logits = inputs.features.heads[REPLACED].flatten()
        return binary_cross_entropy(logits[:, None], labels[:, None])
