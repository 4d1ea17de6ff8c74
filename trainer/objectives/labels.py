"""Losses of labels, and the base of terms about pairs of segments.

A loss is a pure function that returns (sum, count). The objective divides by the count summed over
all ranks and micro-batches. Sums are float32 scalars. Shapes: B rows, K classes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline import NO_LABEL, PAIRS
from data_pipeline.packing.kinds import PACKINGS
from model import Ability, Capture, ModelConfig, ModelShape
from trainer.objectives.term import LossInputs, Term, TermConfig


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
    is_labelled = labels != NO_LABEL
    return loss, is_labelled.sum() if weights is None else (
        weights[labels.clamp(min=0)] * is_labelled
    ).sum()


def binary_cross_entropy(
    logits: Tensor, labels: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of labels that are right (1) or wrong (0), each by itself.

    logits: [B, K]; labels: [B, K] int64, -100 where a row has none; weights: of each label.
    Count: decisions, as torch's BCEWithLogitsLoss has it, or the sum of their weights.
    """
    decisions = (labels != NO_LABEL).expand(logits.shape).float()
    if weights is not None:
        decisions = decisions * weights.float()
    right = labels.clamp(min=0).expand(logits.shape).float()
    loss = F.binary_cross_entropy_with_logits(logits.float(), right, decisions, reduction="sum")
    return loss, decisions.sum()


def squared_error(predictions: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Squared error of one predicted number per example.

    predictions: [B, 1]; numbers: [B] float32, NaN where an example has none. Count: numbers.
    """
    has_number = ~numbers.isnan()
    error = predictions.float()[:, 0] - torch.where(has_number, numbers, 0.0)
    return (error.square() * has_number).sum(), has_number.sum()


@dataclass
class PairConfig(TermConfig):
    """The YAML section of a pair term: the learner gets a pair head, which needs a pooler."""

    needs: ClassVar[tuple[Ability, ...]] = (Ability.POOL,)
    packings: ClassVar[tuple[str, ...]]  # values of `data.packing` whose pair labels it is about

    @property
    def head(self) -> str | None:
        return PAIRS

    @property
    def reads_all_positions(self) -> bool:
        return True

    def equip(self, model: ModelConfig) -> ModelConfig:
        return model.with_pair_head()

    def refusals(self, packings: Collection[str], masked: bool) -> Iterator[str]:
        wrong = [
            packing
            for packing in packings
            if PACKINGS[packing].pair_labels and packing not in self.packings
        ]
        if wrong or not set(packings) & set(self.packings):
            named = ", ".join(wrong or packings)
            yield (f"data.packing {named} has no such pairs; it takes {' or '.join(self.packings)}")

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return PairTerm(self)


class PairTerm(Term):
    """Cross-entropy over two classes; what they mean depends on the packing."""

    denominator = PAIRS

    def student_capture(self, step: int) -> Capture:
        return Capture(last_hidden_state=True)

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        return label_cross_entropy(inputs.features.heads[PAIRS], inputs.batch.row_labels(PAIRS))
