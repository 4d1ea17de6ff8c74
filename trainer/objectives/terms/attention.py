"""Terms that compare attention matrices and relations, which are derived from Q, K and V.

Where layers attend within local windows, only position pairs within the wider window count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from configs.section import Refusal
from model import QKV, ModelShape
from trainer.denominators import ATTENDED, ATTENDED_PAIRS
from trainer.losses.relations import (
    Matrix,
    attention_cross_entropy,
    attention_mse,
    relation_kl,
)
from trainer.objectives.term import (
    LayerMap,
    LayerPair,
    LayerTerm,
    LayerTermConfig,
    LossInputs,
    Term,
    register,
)

QUERIES_AND_KEYS, VALUES_TWICE = ("q", "k"), ("v", "v")
MatrixLoss = Callable[[Matrix, Matrix, Tensor, int], tuple[Tensor, Tensor]]


@dataclass
class MatrixTermConfig(LayerTermConfig):
    """The YAML section of a term that compares one matrix per head with the teacher's."""

    def misfits(self, student: ModelShape, teacher: ModelShape) -> Iterator[Refusal]:
        yield from super().misfits(student, teacher)
        if not student.heads or not teacher.heads:
            yield "", "student and teacher must have attention"
        elif student.heads != teacher.heads:
            yield "", "student and teacher must have the same number of heads"


@register("attention_mse", order=100)
@dataclass
class AttentionMSE(MatrixTermConfig):
    """Mean squared error of pre-softmax attention scores, summed over layers (TinyBERT)."""

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return MatrixTerm(self, student, teacher, attention_mse, denominator=ATTENDED_PAIRS)


@register("attention_transfer", order=130)
@dataclass
class AttentionTransfer(MatrixTermConfig):
    """Cross-entropy of attention distributions, mean over layers (MobileBERT)."""

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return MatrixTerm(self, student, teacher, attention_cross_entropy, averaged=True)


@register("attention_relation", order=160)
@dataclass
class AttentionRelation(MatrixTermConfig):
    """KL divergence of attention distributions, by default of the last layer (MiniLM).

    Summed over layers.
    """

    layers: LayerMap = "final"

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return MatrixTerm(self, student, teacher, relation_kl)


@register("value_relation", order=170)
@dataclass
class ValueRelation(MatrixTermConfig):
    """KL divergence of softmax(V V' / sqrt(D)), by default of the last layer (MiniLM).

    Summed over layers.
    """

    layers: LayerMap = "final"

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return MatrixTerm(self, student, teacher, relation_kl, factors=VALUES_TWICE)


class MatrixTerm(LayerTerm):
    """A loss between one matrix of each attention head and the same matrix of the teacher's."""

    reads_attention = True

    def __init__(
        self,
        config: LayerTermConfig,
        student: ModelShape,
        teacher: ModelShape,
        loss: MatrixLoss,
        factors: tuple[str, str] = QUERIES_AND_KEYS,
        averaged: bool = False,
        denominator: str = ATTENDED,
    ) -> None:
        """`factors` are the two fields of `model.QKV` whose product is the matrix."""
        super().__init__(config, student, teacher)
        self.student, self.teacher = student, teacher
        self.loss, self.factors, self.averaged, self.denominator = (
            loss,
            factors,
            averaged,
            denominator,
        )

    def compare(self, inputs: LossInputs, pairs: list[LayerPair]) -> list[tuple[Tensor, Tensor]]:
        ours, theirs = inputs.features.attention, self.outputs(inputs).attention
        return [
            self.loss(
                self._matrix(ours[pair.ours]),
                self._matrix(theirs[pair.theirs]),
                inputs.batch.attention_mask,
                self._window(pair),
            )
            for pair in pairs
        ]

    def _window(self, pair: LayerPair) -> int:
        """The wider of the two layers' windows, in the units of `ModelShape.window`."""
        windows = self.student.window(pair.ours), self.teacher.window(pair.theirs)
        return max(windows) if all(windows) else 0

    def _matrix(self, qkv: QKV) -> Matrix:
        first, second = self.factors
        return getattr(qkv, first), getattr(qkv, second)
