"""Terms that compare attention matrices and relations, which are derived from Q, K and V.

Their losses are pure functions that return (sum, count).

Scores are derived from queries and keys, a bounded block of rows and queries at a time. The same
pass computes the gradients with respect to queries and keys, so nothing of size [L x L] is kept for
the backward pass. Sums are float32 scalars, averaged over heads.

Shapes: B rows, L positions, A heads, D head width. Queries, keys and values are [B, A, L, D]; the
head width may differ between student and teacher, the number of heads must not; relations can
be of any number of heads (`relation_heads`, MiniLMv2, arXiv 2012.15828). `mask` is [B, L]
bool, True at attended positions, which come first in a row; where a row holds several documents, it
is int64, the number of a position's document, which attends to itself only, or 0. With a `window`,
pairs of positions more than window // 2 apart do not count, and distributions are over the
remaining keys: neither layer attends to the others. A window of 0 means all pairs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from configs.section import Refusal
from model import QKV, Capture, ModelShape
from model.attention_kernel import visible_keys
from model.model_config import WIDTH
from model.precision import is_native, kernel_device
from trainer.denominators import ATTENDED, ATTENDED_PAIRS
from trainer.fusion import fused, fusing, fusion_options
from trainer.objectives.layers import LayerMap, LayerPair, LayerTerm, LayerTermConfig
from trainer.objectives.term import LossInputs, Term, register

# Bytes of the scores of one block, float32, of which a loss holds about six such arrays. A CPU's
# stay near its cache. A GPU's hold 32 rows of 16 heads at L = 512 in one block: in more blocks, a
# kernel would take no longer than its launch.
SCORE_BYTES = 16 * 2**20
GPU_SCORE_BYTES = 512 * 2**20
# TinyBERT's code treats scores from here down as masked and sets them to 0.
LOWEST_SCORE = -1e2
HIDDEN = -1e9

Matrix = tuple[Tensor, Tensor]  # the factors of the scores: queries and keys, or values twice
Block = tuple[slice, slice]  # rows and queries
# Float scores [b, A, l, L] of student and teacher, attended pairs [b, l, L], perhaps with weights
# -> loss, a scalar.
BlockLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
MatrixLoss = Callable[[Matrix, Matrix, Tensor, int], tuple[Tensor, Tensor]]


def attention_mse(
    student: Matrix, teacher: Matrix, mask: Tensor, window: int = 0
) -> tuple[Tensor, Tensor]:
    """(s - t)^2 of pre-softmax scores (TinyBERT, arXiv 1909.10351, eq. 7, as in its code).

    As in the original, where they mark padding, scores of -100 and below are set to 0. Pairs with
    padding do not count here, while the original divides by B * L * L; without padding both are the
    same. Count: pairs of attended positions. Where a `window` hides some pairs of a text, the mean
    over its other pairs stands in for them, so that the count stays the same.
    """
    weights, attended = _mse_weights(mask, window)
    return _sum_over_blocks(_mse_of, student, teacher, mask, window, weights), attended


@fused
def _mse_weights(mask: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """The weight of each key's pairs, [B, L or 1], and the number of attended pairs."""
    lengths = _lengths(mask)
    weights = lengths.square() / _pairs_within(window, lengths).clamp(min=1)
    return weights, (lengths * (mask != 0)).sum()  # each position with all of its text


def _mse_of(ours: Tensor, theirs: Tensor, weights: Tensor) -> Tensor:
    ours, theirs = (F.threshold(scores, LOWEST_SCORE, 0.0) for scores in (ours, theirs))
    return ((ours - theirs).square().mean(dim=1) * weights).sum()


def attention_cross_entropy(
    student: Matrix, teacher: Matrix, mask: Tensor, window: int = 0
) -> tuple[Tensor, Tensor]:
    """-softmax(t) . log softmax(s) over keys (MobileBERT's attention transfer, as in its code).

    arXiv 2004.02984, eq. 2 states the KL divergence, which subtracts the teacher's entropy and has
    the same gradient. Count: attended positions.
    """
    total = _sum_over_blocks(_cross_entropy_of, student, teacher, mask, window)
    return total, (mask != 0).sum()


def _cross_entropy_of(ours: Tensor, theirs: Tensor, pairs: Tensor) -> Tensor:
    log_q, log_p = _log_softmax(ours, pairs), _log_softmax(theirs, pairs)
    return -((log_p.exp() * log_q).sum(dim=-1).mean(dim=1) * pairs.any(dim=-1)).sum()


def relation_kl(
    student: Matrix, teacher: Matrix, mask: Tensor, window: int = 0
) -> tuple[Tensor, Tensor]:
    """KL(softmax(t) || softmax(s)) over keys (MiniLM, arXiv 2002.10957).

    Of queries and keys it is eq. 5 (attention), of values and values eq. 7 (value relations). Of
    queries, keys and values with themselves it is MiniLMv2's (arXiv 2012.15828, eq. 5).
    Count: attended positions.
    """
    return _sum_over_blocks(_kl_of, student, teacher, mask, window), (mask != 0).sum()


def _kl_of(ours: Tensor, theirs: Tensor, pairs: Tensor) -> Tensor:
    log_q, log_p = _log_softmax(ours, pairs), _log_softmax(theirs, pairs)
    divergence = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)
    return (divergence.mean(dim=1) * pairs.any(dim=-1)).sum()


def scaled_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """``q k' / sqrt(D)`` [b, A, l, L] float32, multiplied in the dtype of queries and keys."""
    with torch.autocast(queries.device.type, enabled=False):
        if not is_native(queries.device, queries.dtype):
            queries, keys = queries.float(), keys.float()
        return ((queries * queries.shape[-1] ** -0.5) @ keys.transpose(-1, -2)).float()


def attention_blocks(
    queries: Tensor, keys: Tensor, mask: Tensor, window: int
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """The attention of a layer in blocks: (rows, queries, weights [b, A, l, L], pairs [b, l, L]).

    `pairs` are True where a token attends to a token; the weights of padding mean nothing.
    """
    near = visible_keys(None, mask.shape[1], window, mask.device)
    for block in _blocks(queries):
        pairs = _pairs(mask[block], mask[block[0]], _within(near, block))
        scores = scaled_scores(queries[block[0], :, block[1]], keys[block[0]])
        yield *block, _log_softmax(scores, pairs).exp(), pairs


def _log_softmax(scores: Tensor, pairs: Tensor) -> Tensor:
    return scores.masked_fill(~pairs[:, None], HIDDEN).log_softmax(dim=-1)


def _lengths(mask: Tensor) -> Tensor:
    """The number of tokens in the text of each position as a key: int64 [B, L], or [B, 1]."""
    if mask.dtype == torch.bool:
        return mask.sum(dim=1, keepdim=True)
    sizes = torch.zeros(mask.numel() + 1, dtype=torch.int64, device=mask.device)
    numbers = mask.flatten()
    return sizes.index_add(0, numbers, torch.ones_like(numbers))[mask] * (mask != 0)


def _pairs_within(window: int, lengths: Tensor) -> Tensor:
    """The number of position pairs within the window in texts of these `lengths`, int64."""
    if not window:
        return lengths.square()
    reach = (lengths - 1).clamp(max=window // 2)
    return lengths * (2 * reach + 1) - reach * (reach + 1)


def _sum_over_blocks(
    loss: BlockLoss,
    student: Matrix,
    teacher: Matrix,
    mask: Tensor,
    window: int,
    weights: Tensor | None = None,
) -> Tensor:
    """The sum of a loss of the scores; `weights` of the pairs are by key, [B, L or 1]."""
    near = visible_keys(None, mask.shape[1], window, mask.device)  # [1, 1, L, L], None: all

    def of_block(queries: Tensor, keys: Tensor, block: Block) -> Tensor:
        rows, span = block
        theirs = teacher[0][rows, :, span], teacher[1][rows]
        by_key = None if weights is None else weights[rows]
        masks = mask[block], mask[rows], _within(near, block)
        return _loss_of_block(loss, (queries, keys), theirs, masks, by_key)

    return _SumOverBlocks.apply(*student, of_block)


@fused
def _loss_of_block(
    loss: BlockLoss,
    student: Matrix,
    teacher: Matrix,
    masks: tuple[Tensor, Tensor, Tensor | None],
    weights: Tensor | None,
) -> Tensor:
    pairs = _pairs(*masks)
    if weights is not None:
        pairs = pairs * weights[:, None]
    return loss(scaled_scores(*student), scaled_scores(*teacher), pairs)


def _pairs(queries: Tensor, keys: Tensor, near: Tensor | None) -> Tensor:
    """The pairs that attend to each other [b, l, L], by the masks of queries [b, l] and keys."""
    queries, keys = queries[:, :, None], keys[:, None, :]
    pairs = queries & keys if keys.dtype == torch.bool else (queries == keys) & (queries != 0)
    return pairs if near is None else pairs & near


def _within(near: Tensor | None, block: Block) -> Tensor | None:
    return None if near is None else near[0, :, block[1]]


def _blocks(queries: Tensor) -> Iterator[Block]:
    """Blocks of whole rows or, where one row has too many scores, of its queries."""
    rows, heads, length, _ = queries.shape
    on_cpu = kernel_device(queries.device) == "cpu"
    width = max(1, (SCORE_BYTES if on_cpu else GPU_SCORE_BYTES) // (4 * heads * length))
    height = max(1, width // length)
    for first in range(0, rows, height):
        for begin in range(0, length, width):
            yield slice(first, first + height), slice(begin, begin + width)


class _SumOverBlocks(torch.autograd.Function):
    """Sum of a loss over blocks; the gradients of both factors are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, loss: Callable[[Tensor, Tensor, Block], Tensor]
    ) -> Tensor:
        wanted = any(ctx.needs_input_grad)
        ctx.dtype, ctx.options = queries.dtype, fusion_options.get()
        blocks = list(_blocks(queries))
        if len(blocks) == 1:  # a GPU's: its gradients are whole
            total, ctx.gradients = _differentiated(loss, queries, keys, blocks[0], wanted)
            return total
        ctx.gradients = [torch.zeros_like(x, dtype=torch.float32) for x in (queries, keys)]
        total = queries.new_zeros((), dtype=torch.float32)
        for rows, span in blocks:
            value, gradients = _differentiated(loss, queries, keys, (rows, span), wanted)
            total += value
            if wanted:
                ctx.gradients[0][rows, :, span] = gradients[0]
                ctx.gradients[1][rows] += gradients[1]
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = upstream
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the gradients of a chunked loss can be taken once"
        by_queries, by_keys = gradients
        with fusing(ctx.options):
            return (*_scaled(by_queries, by_keys, scale, ctx.dtype), None)


def _differentiated(
    loss: Callable[[Tensor, Tensor, Block], Tensor],
    queries: Tensor,
    keys: Tensor,
    block: Block,
    wanted: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss of a block and, where wanted, its gradients by the block's queries and keys."""
    rows, span = block
    with torch.set_grad_enabled(wanted):
        parts = (
            queries[rows, :, span].detach().requires_grad_(wanted),
            keys[rows].detach().requires_grad_(wanted),
        )
        value = loss(*parts, block)
    return value.detach(), torch.autograd.grad(value, parts) if wanted else ()


@fused
def _scaled(
    by_queries: Tensor, by_keys: Tensor, scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients times a float32 scale, rounded once."""
    return (by_queries.float() * scale).to(dtype), (by_keys.float() * scale).to(dtype)


@dataclass
class MatrixTermConfig(LayerTermConfig):
    """The YAML section of a term that compares one matrix per head with the teacher's."""

    instead: ClassVar[str] = ""  # of equal numbers of heads
    loss: ClassVar[MatrixLoss] = staticmethod(relation_kl)
    factors: ClassVar[tuple[str, str]] = ("q", "k")  # the fields of `QKV` whose product is compared
    averaged: ClassVar[bool] = False  # over layers
    denominator: ClassVar[str] = ATTENDED

    def build(self, student: ModelShape, teacher: ModelShape) -> Term:
        return MatrixTerm(self, student, teacher)

    def misfits(self, student: ModelShape, teacher: ModelShape) -> Iterator[Refusal]:
        yield from super().misfits(student, teacher)
        if not student.attention_width or not teacher.attention_width:
            whose = "teacher" if student.attention_width else "student"
            yield (
                "",
                f"the {whose}'s model gives no attention scores, queries, keys or values; compare "
                "states or predictions (hidden_mse, cosine, soft_kl)",
            )
        elif student.heads != teacher.heads:
            yield "", "student and teacher must have the same number of heads" + self.instead


@register("attention_mse", order=100)
@dataclass
class AttentionMSE(MatrixTermConfig):
    """Mean squared error of pre-softmax attention scores, summed over layers (TinyBERT)."""

    loss: ClassVar[MatrixLoss] = staticmethod(attention_mse)
    denominator: ClassVar[str] = ATTENDED_PAIRS


@register("attention_transfer", order=130)
@dataclass
class AttentionTransfer(MatrixTermConfig):
    """Cross-entropy of attention distributions, mean over layers (MobileBERT)."""

    loss: ClassVar[MatrixLoss] = staticmethod(attention_cross_entropy)
    averaged: ClassVar[bool] = True


@dataclass
class RelationTermConfig(MatrixTermConfig):
    """The YAML section of a term about relations, summed over layers."""

    instead: ClassVar[str] = ", or relation_heads be set"

    layers: LayerMap = "final"
    relation_heads: Annotated[
        int | None,
        WIDTH,
        "How many relation heads to compare (MiniLMv2): the vectors of all attention heads "
        "are joined and cut into this many parts. null: the attention heads are compared, "
        "so both models must have the same number of them.",
    ] = None

    def misfits(self, student: ModelShape, teacher: ModelShape) -> Iterator[Refusal]:
        if self.relation_heads is None or not (student.attention_width and teacher.attention_width):
            yield from super().misfits(student, teacher)
            return
        yield from LayerTermConfig.misfits(self, student, teacher)
        for whose, shape in (("the student", student), ("the teacher", teacher)):
            if shape.attention_width % self.relation_heads:
                yield (
                    "relation_heads",
                    f"{self.relation_heads} does not divide {whose}'s {shape.attention_width}",
                )


@register("attention_relation", order=160)
@dataclass
class AttentionRelation(RelationTermConfig):
    """KL divergence of attention distributions, by default of the last layer (MiniLM)."""


@register("value_relation", order=170)
@dataclass
class ValueRelation(RelationTermConfig):
    """KL divergence of softmax(V V' / sqrt(D)), by default of the last layer (MiniLM)."""

    factors: ClassVar[tuple[str, str]] = ("v", "v")


@register("query_relation", order=172)
@dataclass
class QueryRelation(RelationTermConfig):
    """KL divergence of softmax(Q Q' / sqrt(D)), by default of the last layer (MiniLMv2)."""

    factors: ClassVar[tuple[str, str]] = ("q", "q")


@register("key_relation", order=174)
@dataclass
class KeyRelation(RelationTermConfig):
    """KL divergence of softmax(K K' / sqrt(D)), by default of the last layer (MiniLMv2)."""

    factors: ClassVar[tuple[str, str]] = ("k", "k")


class MatrixTerm(LayerTerm):
    """A loss between one matrix of each attention head and the same matrix of the teacher's."""

    def __init__(self, config: MatrixTermConfig, student: ModelShape, teacher: ModelShape) -> None:
        super().__init__(config, student, teacher)
        self.student, self.teacher = student, teacher
        self.heads = config.relation_heads if isinstance(config, RelationTermConfig) else None
        self.loss, self.factors = type(config).loss, config.factors
        self.averaged, self.denominator = config.averaged, config.denominator

    def compare(self, inputs: LossInputs, pairs: list[LayerPair]) -> list[tuple[Tensor, Tensor]]:
        ours, theirs = inputs.features.attention, self.outputs(inputs).attention
        return [
            self.loss(
                self._matrix(ours[pair.ours]),
                self._matrix(theirs[pair.theirs]),
                inputs.batch.texts,
                self._window(pair),
            )
            for pair in pairs
        ]

    def _capture(self, layers: set[int]) -> Capture:
        return Capture(attention=tuple(sorted(layers)), values="v" in self.factors)

    def _window(self, pair: LayerPair) -> int:
        """The wider of the two layers' windows, in the units of `ModelShape.window`."""
        windows = self.student.window(pair.ours), self.teacher.window(pair.theirs)
        return max(windows) if all(windows) else 0

    def _matrix(self, qkv: QKV) -> Matrix:
        first, second = (getattr(qkv, name) for name in self.factors)
        return self._in_heads(first), self._in_heads(second)

    def _in_heads(self, x: Tensor) -> Tensor:
        if self.heads is None:
            return x
        return x.transpose(1, 2).flatten(2).unflatten(2, (self.heads, -1)).transpose(1, 2)
