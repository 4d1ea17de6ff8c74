"""Terms over the vocabulary, which never hold the logits of all positions.

Logits exist for one chunk of positions at a time, in float32 or wider, and the losses of
`trainer.objectives.row_losses` are differentiated inside it. The same pass computes the gradients
with respect to the projection's input, weight and bias. So nothing of size [positions x V] is kept
for the backward pass, which does not need the weight either: under ZeRO-3 it has been released by
then.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from data_pipeline import MASKED, NO_LABEL
from model import Capture
from trainer.denominators import ATTENDED
from trainer.fusion import fusion_options
from trainer.objectives.row_losses import RowLoss, RowLosses, kl_divergence_rows
from trainer.objectives.term import LossInputs, Term
from trainer.teacher_outputs import OutputProjection
from trainer.vocabulary_projection import (
    Distribution,
    Projection,
    blocks,
    chunks,
    room_for,
)

# The gradient of a logit is the difference of two probabilities. Most of these are so small that
# float16 rounds them to zero, and the loss scale is applied too late, in the backward pass. They
# are therefore multiplied by this beforehand, and by less in the product with x, whose sums over
# rows may be large.
HALF_SCALE, HALF_SCALE_OF_SUMS = 64.0, 4.0

WeightAndBias = tuple[Tensor, Tensor | None]


def project_and_sum(
    vocabulary_input: Tensor,
    projection: WeightAndBias,
    losses: Sequence[RowLoss],
    weights: Sequence[float] = (1.0,),
) -> tuple[Tensor, Tensor]:
    """Several losses of the logits ``vocabulary_input @ weight' + bias``, which they share.

    vocabulary_input [P, E]; projection (weight [V, E], bias [V]). Returns their weighted sum over
    rows, in the graph, and each loss's own sum, [losses] and detached; float32.
    """
    total, sums = _ProjectAndSum.apply(vocabulary_input, *projection, losses, weights)
    return total, sums


def chunked_kl_divergence(
    student_input: Tensor,
    student_projection: WeightAndBias,
    teacher_input: Tensor,
    teacher_projection: tuple[Tensor | None, Tensor | None],
    temperature: float = 1.0,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``KL(softmax(t / T) || softmax(s / T))`` of teacher and student logits, summed over rows.

    student_input [P, E], teacher_input [P, E'] at the same positions; projections (weight [V, E],
    bias [V]); the teacher's weight is None where its input is the logits. `weights` [P] multiplies
    rows, None for ones. The teacher gets no gradient. Returns float32 (sum, sum of the weights).
    The factor T^2 is left to the objective.
    """
    if weights is None:
        weights = torch.ones(len(student_input), device=student_input.device)
    weights = weights.float()
    teacher = Distribution(OutputProjection(*teacher_projection).logits(teacher_input))
    rows = kl_divergence_rows(teacher, temperature, weights)
    return project_and_sum(student_input, student_projection, [rows])[0], weights.sum()


class _ProjectAndSum(torch.autograd.Function):
    """Sums of row losses over projected rows; the gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        losses: Sequence[RowLoss],
        weights: Sequence[float],
    ) -> tuple[Tensor, Tensor]:
        projection = Projection(x, weight, bias)
        wanted = ctx.needs_input_grad[:3]
        gradients = _Gradients(projection, wanted)
        sums = torch.zeros(len(losses), dtype=projection.dtype, device=x.device)
        row_losses, room = RowLosses(losses, weights), None
        is_fused = fusion_options.get() is not None and any(wanted)
        for rows in chunks(len(x), len(weight), x.device):
            if is_fused:
                sums += gradients.add_fused(row_losses, rows)
                continue
            room = room_for(projection, rows) if room is None else room  # the first is the largest
            logits = projection.logits(rows, room)
            for block in blocks(rows, logits):
                some = logits[block.start - rows.start : block.stop - rows.start]
                sums += row_losses.differentiate(some, block)
            if any(wanted):
                gradients.add(logits, rows)
        ctx.gradients, ctx.scale = gradients.cast(x, weight, bias), gradients.scale
        ctx.mark_non_differentiable(sums)
        weighted = [total * weight for total, weight in zip(sums.unbind(), weights, strict=True)]
        return torch.stack(weighted).sum(), sums

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        factor, _ = upstream
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the gradients of a chunked loss can be taken once"
        x, weight, bias = gradients
        if x is not None:  # in a narrow dtype: round the product only, not the factor
            x = (x.to(factor.dtype) * (factor / ctx.scale)).to(x.dtype)
        return x, *[None if g is None else g.mul_(factor) for g in (weight, bias)], None, None


class _Gradients:
    """Sums over chunks of the gradients with respect to input, weight and bias."""

    def __init__(self, projection: Projection, wanted: tuple[bool, ...]) -> None:
        self.projection = projection
        self.x: list[Tensor] | None = [] if wanted[0] else None
        self.want_weight, self.want_bias = wanted[1], wanted[2]
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        is_half = projection.weight.dtype == torch.float16
        self.scale, self.scale_of_sums = (HALF_SCALE, HALF_SCALE_OF_SUMS) if is_half else (1.0, 1.0)

    def add(self, logit_gradient: Tensor, rows: slice) -> None:
        """Add a chunk; `logit_gradient` [C, V], which may be overwritten."""
        summed = logit_gradient.sum(dim=0) if self.want_bias else None
        if self.scale != 1.0:
            logit_gradient.mul_(self.scale)
        self._add(self.projection.as_factor(logit_gradient), summed, rows)

    def add_fused(self, losses: RowLosses, rows: slice) -> Tensor:
        """Add the gradients of a chunk's losses, in fused kernels; returns the sum of each loss."""
        projection = self.projection
        bias = projection.bias
        if bias is None:
            bias = projection.weight.new_zeros(projection.shape[1], dtype=projection.dtype)
        product = projection.product(rows)
        sums, narrow = losses.differentiate_products(product, bias, rows, self.scale)
        summed = None
        if self.want_bias:  # of the rounded gradient, else all of it would be stored in float32 too
            summed = narrow[:, : len(bias)].sum(dim=0, dtype=bias.dtype).div_(self.scale)
        self._add(narrow, summed, rows)
        return sums

    def _add(self, narrow: Tensor, summed: Tensor | None, rows: slice) -> None:
        """Add `scale` times a chunk's gradient of the product, and the bias's gradient [V]."""
        if summed is not None:
            self.bias = summed if self.bias is None else self.bias.add_(summed)
        x = self.projection.x[rows]
        if self.scale != 1.0:
            x = x * (self.scale_of_sums / self.scale)
        with torch.autocast(narrow.device.type, enabled=False):
            if self.x is not None:
                self.x.append(narrow @ self.projection.weight)
            if self.want_weight:
                self.weight = _accumulate(self.weight, narrow.t(), x)

    def cast(
        self, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The three gradients, each in the dtype of its tensor; None where not wanted.

        The gradient of x is still multiplied by `scale`.
        """
        x_gradient = torch.cat(self.x).to(x.dtype) if self.x else None
        weight_gradient = None
        if self.weight is not None:
            weight_gradient = self.weight[: len(weight)].to(weight.dtype)
            if self.scale_of_sums != 1.0:
                weight_gradient /= self.scale_of_sums
        if bias is None or self.bias is None:
            return x_gradient, weight_gradient, None
        return x_gradient, weight_gradient, self.bias.to(bias.dtype)


def _accumulate(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``total + a @ b``, kept in float32 or wider as soon as there is more than one summand."""
    if total is None:
        return a @ b
    wide = torch.promote_types(a.dtype, torch.float32)
    if total.dtype == a.dtype == wide:
        return total.addmm_(a, b)
    return total.to(wide).add_(a @ b)


class VocabularyTerm(Term):
    """A term over the vocabulary, at masked or at all attended positions (its denominator).

    Terms at the same positions share one projection.
    """

    group = "over the vocabulary"

    @abstractmethod
    def row_loss(self, inputs: LossInputs) -> RowLoss:
        """The loss per position, for `project_and_sum`."""

    def compute(
        self, group: Sequence[Term], weights: Sequence[float], inputs: LossInputs
    ) -> tuple[Tensor, Sequence[Tensor]]:
        losses = [cast(VocabularyTerm, term).row_loss(inputs) for term in group]
        total, sums = project_and_sum(*projected(inputs, self.denominator), losses, weights)
        return total, sums.unbind()

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        total, _ = self.compute([self], [1.0], inputs)
        return total, weigh_positions(inputs, self.denominator).sum()

    def student_capture(self, step: int) -> Capture:
        return Capture(all_positions=self.denominator == ATTENDED)

    def source_capture(self, step: int) -> Capture:
        return Capture(all_positions=self.denominator == ATTENDED and self.reads_logits)


def projected(inputs: LossInputs, positions: str) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """The input [P, E] of the vocabulary projection at these positions, its weight and its bias."""
    assert inputs.projection is not None
    weight, bias = inputs.projection.weight, inputs.projection.bias
    assert weight is not None, "the projection of a model that is trained"
    x = inputs.features.vocabulary_input if positions == MASKED else inputs.features.all_positions
    assert x is not None
    return x, (weight, bias)


def weigh_positions(inputs: LossInputs, positions: str) -> Tensor:
    """The weight of each position, float [P]: 1 if it counts, else 0.

    P is B * L for attended positions, and the number of slots for masked ones.
    """
    if positions == MASKED:
        return (inputs.batch.targets[MASKED].labels >= 0).float()
    return inputs.batch.attention_mask.flatten().float()


def labels_at(inputs: LossInputs, positions: str) -> Tensor:
    """The token to predict at each position, int64 [P]; -100: none, as at all attended ones."""
    if positions == MASKED:
        return inputs.batch.targets[MASKED].labels
    return torch.full_like(inputs.batch.input_ids.flatten(), NO_LABEL)
