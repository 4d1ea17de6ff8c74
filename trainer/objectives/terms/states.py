"""Terms that compare the hidden states of learner and teacher, and their losses.

A loss is a pure function that returns (sum, count). The objective divides by the count summed over
all ranks and micro-batches. The sum already contains the mean over constant sizes (the hidden
width), so the counts are those of `trainer.denominators`. Sums are float32 scalars.

Shapes: B rows, L positions, H hidden width. [..., H] with a mask [...] stands for [B, L, H] with
attended positions, or [P, H] with masked positions. Masks are bool.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs.rules import OneOf
from configs.section import Refusal
from data_pipeline import MASKED
from model import Capture, ModelShape
from trainer.denominators import ATTENDED, ROWS
from trainer.fusion import fused
from trainer.objectives.layers import LayerMap, LayerPair, LayerTerm, LayerTermConfig
from trainer.objectives.stages import STATES
from trainer.objectives.term import POSITIONS, LossInputs, TeacherTermConfig, Term, Weight, register

StateLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@fused
def cosine_distance(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """1 - cos(student, teacher) (DistilBERT, arXiv 1910.01108, section 3).

    student, teacher: [..., H]; mask: [...]. Count: positions in the mask.
    """
    distance = 1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1)
    return _masked_sum(distance, mask)


@fused
def hidden_mse(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """|student - teacher|^2 / H (TinyBERT, arXiv 1909.10351, eq. 8; eq. 9 for embeddings).

    student, teacher: [..., H]; mask: [...]. Count: positions in the mask. The original code divides
    by B * L, padding included; without padding both are the same.
    """
    return _masked_sum((student.float() - teacher.float()).square().mean(dim=-1), mask)


@fused
def hidden_mses(
    students: Tensor, teachers: Sequence[Tensor], mask: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """`hidden_mse` of P students [P, ..., H], each with its teacher, fused as one."""
    return [hidden_mse(*pair, mask) for pair in zip(students, teachers, strict=True)]


@fused
def patient_mse(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """|s / |s| - t / |t||^2 / H of [CLS] states (PKD, arXiv 1908.09355, eq. 7; H as in its code).

    student, teacher: [B, H]; mask: [B]. Count: rows in the mask.
    """
    ours, theirs = F.normalize(student.float(), dim=-1), F.normalize(teacher.float(), dim=-1)
    return _masked_sum((ours - theirs).square().mean(dim=-1), mask)


@fused
def feature_map_mse(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """|norm(s) - norm(t)|^2 / H, norm being layer normalisation without weights (MobileBERT).

    Feature map transfer, arXiv 2004.02984, eq. 1, on normalised states as in its code.
    student, teacher: [..., H]; mask: [...]. Count: positions in the mask.
    """
    ours, theirs = (F.layer_norm(x.float(), x.shape[-1:], eps=1e-12) for x in (student, teacher))
    return _masked_sum((ours - theirs).square().mean(dim=-1), mask)


@fused
def mean_difference(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(mean(s) - mean(t))^2 of the means over the width (MobileBERT's code, beta).

    student: [..., H]; teacher: [..., H']; mask: [...]. Count: positions in the mask. The original
    code mistakenly averages over all of the teacher's layers; this uses the layer's own mean.
    """
    difference = student.float().mean(dim=-1) - teacher.float().mean(dim=-1)
    return _masked_sum(difference.square(), mask)


@fused
def variance_difference(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """|var(s) - var(t)| of the variances over the width (MobileBERT's code, gamma).

    Arguments, count and remark as for `mean_difference`. Where layer norms make both variances 1,
    rounding decides the sign of the difference, and so the sign of the gradient.
    """
    ours, theirs = (x.float().var(dim=-1, correction=0) for x in (student, teacher))
    return _masked_sum((ours - theirs).abs(), mask)


def _masked_sum(losses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return (losses * mask).sum(), mask.sum()


@register("cosine", order=70)
@dataclass
class Cosine(TeacherTermConfig):
    """1 - cos of the last hidden states, at attended or masked positions (DistilBERT)."""

    compares: ClassVar[str] = STATES
    compares_spans: ClassVar[bool] = True

    positions: Annotated[str, OneOf(*POSITIONS), "The positions to compare."] = ATTENDED

    def misfits(self, student: ModelShape, teacher: ModelShape) -> Iterator[Refusal]:
        yield from unequal_widths(student, teacher)

    @property
    def reads_masked(self) -> bool:
        return self.positions == MASKED

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return CosineTerm(self)


class CosineTerm(Term):
    def __init__(self, config: Cosine) -> None:
        super().__init__(config)
        self.denominator = config.positions

    def student_capture(self, step: int) -> Capture:
        return Capture(last_hidden_state=True)

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        ours, theirs = inputs.features.last_hidden_state, self.outputs(inputs).last_hidden_state
        assert ours is not None
        assert theirs is not None
        mask = inputs.batch.attention_mask
        if self.denominator == MASKED:
            target = inputs.batch.targets[MASKED]
            assert target.positions is not None
            mask = target.labels >= 0
            ours, theirs = (
                states.flatten(0, 1).index_select(0, target.positions) for states in (ours, theirs)
            )
        return cosine_distance(ours, theirs, mask)


@register("hidden_mse", order=90)
@dataclass
class HiddenMSE(LayerTermConfig):
    """Mean squared error of hidden states after one learnable H_s -> H_t projection (TinyBERT).

    Summed over layers. As in TinyBERT's code, the same projection also compares the embedding
    output, whose weight comes first in `layer_weights`. For the form in the paper, set
    `embedding: false` and add the term `embedding`, which has a projection of its own.
    """

    compares_spans: ClassVar[bool] = True

    embedding: Annotated[bool, "Compare the embedding output too, with the same projection."] = True

    @property
    def above(self) -> tuple[int, ...]:
        return (0,) if self.embedding else ()

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return HiddenMSETerm(self, student, teacher)


@register("embedding", order=80)
@dataclass
class Embedding(TeacherTermConfig):
    """Mean squared error of the embedding output after its own H_s -> H_t projection (TinyBERT)."""

    compares: ClassVar[str] = STATES
    compares_spans: ClassVar[bool] = True

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return EmbeddingTerm(self, student, teacher)


class HiddenMSETerm(LayerTerm):
    denominator = ATTENDED

    def __init__(self, config: HiddenMSE, student: ModelShape, teacher: ModelShape) -> None:
        super().__init__(config, student, teacher)
        self.projection = nn.Linear(student.hidden_size, teacher.hidden_size)

    def compare(self, inputs: LossInputs, pairs: list[LayerPair]) -> list[tuple[Tensor, Tensor]]:
        ours, theirs = inputs.features.hidden_states, self.outputs(inputs).hidden_states
        # One call of the projection for all layers: [pairs, B, L, H_s] -> [pairs, B, L, H_t].
        projected = self.projection(torch.stack([ours[pair.ours] for pair in pairs]))
        return hidden_mses(
            projected, [theirs[p.theirs] for p in pairs], inputs.batch.attention_mask
        )


class EmbeddingTerm(Term):
    denominator = ATTENDED

    def __init__(self, config: Embedding, student: ModelShape, teacher: ModelShape) -> None:
        super().__init__(config)
        self.projection = nn.Linear(student.hidden_size, teacher.hidden_size)

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        ours = self.projection(inputs.features.hidden_states[0])
        return hidden_mse(ours, self.outputs(inputs).hidden_states[0], inputs.batch.attention_mask)

    def student_capture(self, step: int) -> Capture:
        return Capture(hidden_states=(0,))


@register("pkd", order=110)
@dataclass
class PKD(LayerTermConfig):
    """Squared distance of normalised [CLS] states, mean over layers and width (PKD's code)."""

    compares_spans: ClassVar[bool] = True

    layers: LayerMap = "skip"

    def misfits(self, student: ModelShape, teacher: ModelShape) -> Iterator[Refusal]:
        yield from super().misfits(student, teacher)
        yield from unequal_widths(student, teacher)

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return PKDTerm(self, student, teacher)


class PKDTerm(LayerTerm):
    denominator = ROWS
    averaged = True

    def compare(self, inputs: LossInputs, pairs: list[LayerPair]) -> list[tuple[Tensor, Tensor]]:
        ours, theirs = inputs.features.hidden_states, self.outputs(inputs).hidden_states
        firsts, mask = inputs.batch.first_tokens

        def states(of: Tensor) -> Tensor:
            return of.flatten(0, 1).index_select(0, firsts)

        return [
            patient_mse(states(ours[pair.ours]), states(theirs[pair.theirs]), mask)
            for pair in pairs
        ]


@dataclass
class StateTransferConfig(LayerTermConfig):
    """The YAML section of a term that compares states, each by itself, with the teacher's."""

    compares_spans: ClassVar[bool] = True
    loss: ClassVar[StateLoss]

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return StateTransferTerm(self, student, teacher)


@register("feature_maps", order=120)
@dataclass
class FeatureMaps(StateTransferConfig):
    """Mean squared error of states normalised over their width, mean over layers (MobileBERT)."""

    loss: ClassVar[StateLoss] = staticmethod(feature_map_mse)

    weight: Weight = 100.0

    def misfits(self, student: ModelShape, teacher: ModelShape) -> Iterator[Refusal]:
        yield from super().misfits(student, teacher)
        yield from unequal_widths(student, teacher)


@register("mean_transfer", order=140)
@dataclass
class MeanTransfer(StateTransferConfig):
    """Squared difference of the states' means over their width, mean over layers (MobileBERT)."""

    loss: ClassVar[StateLoss] = staticmethod(mean_difference)

    weight: Weight = 5000.0


@register("variance_transfer", order=150)
@dataclass
class VarianceTransfer(StateTransferConfig):
    """Distance of the states' variances over their width, mean over layers (MobileBERT)."""

    loss: ClassVar[StateLoss] = staticmethod(variance_difference)

    weight: Weight = 5.0


class StateTransferTerm(LayerTerm):
    denominator = ATTENDED
    averaged = True

    def __init__(
        self, config: StateTransferConfig, student: ModelShape, teacher: ModelShape
    ) -> None:
        super().__init__(config, student, teacher)
        self.loss = type(config).loss

    def compare(self, inputs: LossInputs, pairs: list[LayerPair]) -> list[tuple[Tensor, Tensor]]:
        ours, theirs = inputs.features.hidden_states, self.outputs(inputs).hidden_states
        mask = inputs.batch.attention_mask
        return [self.loss(ours[pair.ours], theirs[pair.theirs], mask) for pair in pairs]


def unequal_widths(student: ModelShape, teacher: ModelShape) -> Iterator[Refusal]:
    """A refusal where the hidden states differ in width: they cannot be compared directly."""
    if not teacher.token_states:
        yield "", "the teacher gives no state for every token; compare predictions"
    elif student.hidden_size != teacher.hidden_size:
        yield "", "student and teacher must have the same hidden_size"
