"""Scaled dot-product attention: the kernels, and the only place that chooses among them.

``plain`` is two matrix products. ``fused`` is torch's ``scaled_dot_product_attention``. ``varlen``
is flash attention over sequences of different lengths (``torch.nn.attention.varlen``). It does no
work on padding, between documents or outside a local window. It has gradients, but needs CUDA and a
16-bit dtype. On a CPU, ``runs`` is the fused kernel for each document of a row by itself, and
``bands`` for blocks of queries with the keys in their windows.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.documents import AttentionMask, Documents, RealTokens
from model.precision import is_native, kernel_device

PLAIN, FUSED, VARLEN, RUNS, BANDS = "plain", "fused", "varlen", "runs", "bands"

# The longest sequence for which a CPU uses plain matrix products. With bfloat16 instructions the
# fused kernel takes 3.4 times as long as they do at L = 128. In float32 it takes three quarters of
# their time at L = 128 and slightly less at L = 64. For heads narrower than 32 both take equally
# long up to L = 192, but the fused kernel's gradients have four times the rounding error. Forward
# alone, in float32 with padding, it takes half to three quarters of their time from L = 8 to 64.
_CPU_PLAIN_LENGTH = {torch.bfloat16: 384, torch.float16: 384, torch.float32: 96}
_CPU_PLAIN_LENGTH_NARROW = 192
_NARROW = 32
# The longest row of several documents for which a CPU masks the other documents rather than take
# one by one. At L = 256 the latter takes 0.7 to 1.0 of the time, at L = 512 0.3 to 0.9.
_CPU_MASKED_LENGTH = 192
# On a CPU the queries of a long row attend in blocks of this many or of the window. At 8 blocks a
# row it takes 0.6 of the time, at 32 blocks 0.14; at 4 it takes as long.
_CPU_BAND = 128
_CPU_FEWEST_BANDS = 8
_WIDEST_FLASH_HEAD = 256
_HEAD_MULTIPLE = 8  # of a GPU's flash and memory-efficient kernels; others get the math kernel
# The kernels that a GPU may use with a mask. From torch 2.11 on, an H100 or a B200 prefers cuDNN's.
# With a mask its gradients may be NaN at lengths of 64, 192, 320, ... (pytorch/pytorch#196678), and
# a mask of numbers, as DeBERTa's, gets no gradient there.
_WITH_MASK = [
    SDPBackend.FLASH_ATTENTION,  # a CPU's, in plans for GPUs
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


class Distances(NamedTuple):
    """The distances between the positions of a batch (`model.parts.RelativePositions`).

    vectors: [R, H], of those that occur.
    numbers: int64 [L, L], the vector of each query's distance to each key.
    """

    vectors: Tensor
    numbers: Tensor


class AttentionPattern(NamedTuple):
    """The keys that the queries of a layer may attend to, in the form that its kernel takes.

    visible: for ``fused``, bool, broadcastable to [B, A, L, L], True where a query may attend;
        None: everywhere. For ``bands``, [B or 1, blocks, 1, queries, keys].
    hiding: for ``plain``, of the same shape, in the dtype of q and k: what is added to the scores.
    seeing: for ``plain``, [B or 1, 1, L, 1]: 0 at a query that sees no key, as padding far from
        every real token, else 1; None where all queries of a row see the same keys.
    boundaries: for ``varlen``, int32 [N + 1]: the offsets that cut the B * L positions into N
        runs. A query attends only inside its run.
    sizes: for ``runs``, the lengths of the runs.
    window: for ``varlen``, ``runs`` and ``bands``, as in `visible_keys`.
    is_causal: for ``varlen`` and ``runs``, as in `Documents`.
    tokens: the rows' real tokens, where a layer computes only these.
    distances: where scores depend on them. Then the kernel is ``plain`` or ``fused``, and the layer
        adds to `hiding`, or makes of `visible` numbers that are added.
    """

    kernel: str
    visible: Tensor | None = None
    hiding: Tensor | None = None
    seeing: Tensor | None = None
    boundaries: Tensor | None = None
    sizes: tuple[int, ...] = ()
    window: int = 0
    is_causal: bool = False
    tokens: RealTokens | None = None
    distances: Distances | None = None

    @property
    def copied(self) -> RealTokens | None:
        """The tokens, where q, k and v have to be copied into their rows: ``varlen`` needs none."""
        return None if self.kernel == VARLEN else self.tokens

    def on(self, tokens: RealTokens) -> AttentionPattern:
        """This pattern for layers that compute only these tokens."""
        boundaries = tokens.boundaries if self.kernel == VARLEN else None
        return self._replace(tokens=tokens, boundaries=boundaries)

    @classmethod
    def of(cls, kernel: str, visible: Tensor | None, dtype: torch.dtype) -> AttentionPattern:
        """The pattern for ``plain`` or ``fused``; `dtype` is that of q, k and v."""
        if kernel != PLAIN or visible is None:
            return cls(kernel, visible)
        # Half of the lowest number, so that no sum overflows. Its exponential is 0 all the same.
        lowest = torch.finfo(dtype).min / 2
        hiding = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, lowest)
        by_query = visible.shape[2] > 1
        seeing = visible.any(dim=-1, keepdim=True).to(dtype) if by_query else None
        return cls(kernel, hiding=hiding, seeing=seeing)


def choose_kernel(
    device: str,
    dtype: torch.dtype,
    length: int,
    head_size: int,
    skips: bool,
    dropout: float,
    runs: bool = False,
    window: int = 0,
) -> str:
    """The fastest kernel for a device type, its operands, and keys that may be skipped.

    `skips`: rows end in padding of known length or hold several documents, or a window hides keys.
    `runs`: rows hold several documents of sizes that the host knows. `window`: that of rows without
    documents. The choice for CPUs was
    measured (benchmarks/LIMITS.md), forward and backward; in inference mode, forward.
    The choice does not depend on whether a layer is captured, so capture does not change rounding.
    An exported graph always uses ``plain``, which serves every length.
    """
    if torch.compiler.is_exporting():
        return PLAIN
    if device == "cpu":
        if runs and length > _CPU_MASKED_LENGTH:
            return RUNS
        if window and length >= _CPU_FEWEST_BANDS * max(window, _CPU_BAND):
            return BANDS
        if dtype == torch.float32 and torch.is_inference_mode_enabled():
            return FUSED
        longest = _CPU_PLAIN_LENGTH.get(dtype, 0)
        if head_size < _NARROW:
            longest = max(longest, _CPU_PLAIN_LENGTH_NARROW)
        return PLAIN if length <= longest else FUSED
    fits = dtype in (torch.float16, torch.bfloat16) and not dropout
    fits = fits and head_size <= _WIDEST_FLASH_HEAD
    return VARLEN if skips and fits and device == "cuda" and _has_varlen() else FUSED


@lru_cache(maxsize=1)
def _has_varlen() -> bool:
    parameters = inspect.signature(_varlen_attention()).parameters
    if not {"window_size", "scale"} <= parameters.keys():  # before torch 2.11
        return False
    return torch.cuda.get_device_capability() >= (8, 0)


def _varlen_attention() -> Callable[..., Any]:
    """torch's varlen attention. Imported late: it imports torch.compile, a second."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def attention_pattern(
    attention_mask: AttentionMask | None,
    window: int,
    shape: tuple[int, int],
    head_size: int,
    operands: tuple[torch.device, torch.dtype],
    dropout: float,
    distances: Distances | None = None,
) -> AttentionPattern:
    """The pattern of all layers with this `window`, and its kernel, for a batch of `shape` (B, L).

    `attention_mask` and `window` are as in `visible_keys`. `operands` is the device and dtype of
    q, k and v. `distances` are those on which scores depend.
    """
    (rows, length), (device, dtype) = shape, operands
    if not is_native(device, dtype):
        dtype = torch.float32
    window = window if hides(window, length) else 0
    if isinstance(attention_mask, Tensor):
        skips = attention_mask.ndim == 1
    else:
        skips = attention_mask is not None or window > 0
    documents = attention_mask if isinstance(attention_mask, Documents) else None
    sizes = () if documents is None else documents.sizes
    kind, runs = kernel_device(device), bool(sizes)
    near = window if documents is None else 0
    if distances is not None:  # the kernels that skip take no numbers to add to the scores
        skips, runs, near = False, False, 0
    kernel = choose_kernel(kind, dtype, length, head_size, skips, dropout, runs, near)
    is_causal = documents is not None and documents.is_causal
    if kernel == RUNS:
        return AttentionPattern(kernel, sizes=sizes, window=window, is_causal=is_causal)
    if kernel == BANDS:
        assert not isinstance(attention_mask, Documents)
        in_bands = _visible_in_bands(attention_mask, length, window, device)
        return AttentionPattern(kernel, in_bands, window=window)
    if kernel != VARLEN:
        visible = visible_keys(attention_mask, length, window, device)
        return AttentionPattern.of(kernel, visible, dtype)._replace(distances=distances)
    if isinstance(attention_mask, Documents):
        boundaries = attention_mask.boundaries
    else:
        boundaries = run_boundaries(attention_mask, rows, length, device)
    return AttentionPattern(kernel, boundaries=boundaries, window=window, is_causal=is_causal)


def run_boundaries(lengths: Tensor | None, rows: int, length: int, device: torch.device) -> Tensor:
    """The offsets of runs in the B * L positions: int32 [B + 1], or [2 B + 1] with `lengths` [B].

    The real tokens of a row are one run and its padding is another. Every position belongs to a
    run, so that nothing is copied and no output is undefined. A run may be empty.
    """
    starts = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)
    if lengths is None:
        return starts
    ends = starts[:-1] + lengths.to(torch.int32)
    return torch.cat([torch.stack([starts[:-1], ends], dim=1).flatten(), starts[-1:]])


def attend(q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float) -> Tensor:
    """Scaled dot-product attention.

    q, k and v are [B, A, L, D]; `dropout` is the probability for attention weights. Returns
    [B, A, L, D]. The output at padding is finite but meaningless.
    """
    if not is_native(q.device, q.dtype):
        with torch.autocast(q.device.type, enabled=False):
            return attend(q.float(), k.float(), v.float(), pattern, dropout).to(q.dtype)
    if pattern.kernel == RUNS:
        return _attend_each_run(q, k, v, pattern, dropout)
    if pattern.kernel == BANDS:
        return _attend_in_bands(q, k, v, pattern, dropout)
    if pattern.kernel != PLAIN:
        return _attend_fused(q, k, v, pattern, dropout)
    scores = attention_scores(q, k)
    if pattern.hiding is not None:
        scores += pattern.hiding
    weights = F.softmax(scores, dim=-1)
    if dropout:
        weights = F.dropout(weights, dropout)
    mixed = weights @ v
    # A query whose window hides every key gets 0, as from the fused kernel. A row without any real
    # token is all padding: what it gets is meaningless.
    return mixed if pattern.seeing is None else mixed * pattern.seeing


def _attend_fused(
    q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float
) -> Tensor:
    """Attention by one kernel. On a GPU heads are padded with zeros to a size that it takes."""
    size, scale, on_gpu = q.shape[-1], None, kernel_device(q.device) == "cuda"
    if size % _HEAD_MULTIPLE and on_gpu:
        q, k, v = (F.pad(x, (0, -size % _HEAD_MULTIPLE)) for x in (q, k, v))
        scale = size**-0.5  # by the padded size it would be another
    if pattern.kernel == VARLEN:
        return _attend_runs(q, k, v, pattern, scale)[..., :size]
    is_limited = on_gpu and pattern.visible is not None
    with sdpa_kernel(_WITH_MASK) if is_limited else contextlib.nullcontext():
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=pattern.visible, dropout_p=dropout, scale=scale
        )
    return mixed[..., :size]


def _attend_runs(
    q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, scale: float | None
) -> Tensor:
    """Attention within runs of the flattened positions, each position within its window."""
    rows, _, length, _ = q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [B * L, A, D]
    reach = pattern.window // 2 if pattern.window else -1
    near = reach, 0 if pattern.is_causal else reach  # keys before and behind a query
    flash, cuts = _varlen_attention(), pattern.boundaries
    longest = length if pattern.tokens is None else pattern.tokens.length
    mixed = flash(q, k, v, cuts, cuts, longest, longest, window_size=near, scale=scale)
    assert isinstance(mixed, Tensor)
    return mixed.unflatten(0, (rows, length)).transpose(1, 2)


def _attend_each_run(
    q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float
) -> Tensor:
    """Attention within runs of the flattened positions, one run after the other."""
    shape = q.shape[0], q.shape[2]
    near = visible_keys(None, max(pattern.sizes), pattern.window, q.device)
    is_causal = pattern.is_causal and near is None
    if pattern.is_causal and near is not None:
        near = near.tril()
    parts = (x.transpose(1, 2).flatten(0, 1).split(pattern.sizes) for x in (q, k, v))
    mixed = []
    for size, *run in zip(pattern.sizes, *parts, strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in run)  # [1, A, size, D]
        visible = None if near is None else near[..., :size, :size]
        of_run = F.scaled_dot_product_attention(q, k, v, visible, dropout, is_causal)
        mixed.append(of_run[0].transpose(0, 1))
    return torch.cat(mixed).unflatten(0, shape).transpose(1, 2)


def _attend_in_bands(
    q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float
) -> Tensor:
    """Attention of each block of queries to the keys in their windows, all blocks as a batch."""
    visible = pattern.visible
    assert visible is not None
    rows, _, length, _ = q.shape
    size, keys = visible.shape[-2:]
    reach, missing = pattern.window // 2, -length % size
    q = F.pad(q, (0, 0, 0, missing)).unflatten(2, (-1, size))  # [B, A, blocks, size, D]
    k, v = (
        F.pad(x, (0, 0, reach, reach + missing)).unfold(2, keys, size).transpose(3, 4)
        for x in (k, v)
    )
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # [B * blocks, A, ..., D]
    visible = visible.expand(rows, -1, -1, -1, -1).flatten(0, 1)
    mixed = F.scaled_dot_product_attention(q, k, v, visible, dropout)
    return mixed.unflatten(0, (rows, -1)).transpose(1, 2).flatten(2, 3)[:, :, :length]


def _visible_in_bands(
    attention_mask: Tensor | None, length: int, window: int, device: torch.device
) -> Tensor:
    """The keys that each query of a block may attend to: see `AttentionPattern.visible`."""
    size, reach = max(window, _CPU_BAND), window // 2
    places = torch.arange(-reach, size + reach, device=device)  # from the first query of a block
    near = (places - torch.arange(size, device=device)[:, None]).abs() <= reach
    keys = torch.arange(0, length, size, device=device)[:, None] + places
    real = ((keys >= 0) & (keys < length))[None]  # [1, blocks, keys]
    seen = visible_keys(attention_mask, length, 0, device)
    if seen is not None:
        real = real & seen[:, 0, 0][:, keys.clamp(0, length - 1)]
    return (near & real[:, :, None])[:, :, None]


def attention_scores(q: Tensor, k: Tensor, visible: Tensor | None = None) -> Tensor:
    """``q k' / sqrt(D)`` [B, A, L, L]; the dtype's lowest value where `visible` is False."""
    scores = (q * (1.0 / math.sqrt(q.shape[-1]))) @ k.transpose(-1, -2)
    if visible is None:
        return scores
    return scores.masked_fill(~visible, torch.finfo(scores.dtype).min)


def visible_keys(
    attention_mask: AttentionMask | None, length: int, window: int, device: torch.device
) -> Tensor | None:
    """The keys that each query may attend to: bool [B or 1, 1, L or 1, L], or None for all keys.

    `attention_mask` [B, L] is nonzero at real tokens; [B] is the number of real tokens at the start
    of each row; of `Documents` a query attends to its own. With a `window` a position attends to
    window // 2 neighbours on either side. A window of 0, or one that covers the sequence, hides no
    key.
    """
    if attention_mask is None and not window:
        return None
    visible, position = None, torch.arange(length, device=device)
    if isinstance(attention_mask, Documents):
        numbers = attention_mask.numbers
        visible = (numbers[:, :, None] == numbers[:, None, :])[:, None]
        if attention_mask.is_causal:
            visible &= position[:, None] >= position
    elif attention_mask is not None:
        per_token = attention_mask.ndim == 2
        real = attention_mask != 0 if per_token else position < attention_mask[:, None]
        visible = real[:, None, None, :]
    if hides(window, length):
        near = (position[:, None] - position[None, :]).abs() <= window // 2
        visible = near[None, None] if visible is None else visible & near
    return visible


def hides(window: int, length: int) -> bool:
    """Whether a window hides any key of a sequence of this length; in an exported graph, of any."""
    return window > 0 and (torch.compiler.is_exporting() or length - 1 > window // 2)


def with_positions(
    q: Tensor, k: Tensor, of_keys: Tensor, of_queries: Tensor, pattern: AttentionPattern
) -> tuple[Tensor, AttentionPattern]:
    """The queries, scaled, and the pattern with what the distances add to the scores (DeBERTa).

    The score of a query i and a key j is ``(q_i k_j + q_i K(i - j) + k_j Q(i - j)) / sqrt(3 D)``,
    where K and Q are the layer's own projections of the vector of a distance (arXiv 2006.03654,
    section 3.1, with the shared projections of its second version, arXiv 2111.09543).

    q and k are [B, A, L, D], `of_keys` and `of_queries` K and Q of all vectors, [A, R, D].
    """
    assert pattern.distances is not None
    numbers = pattern.distances.numbers.expand(*q.shape[:2], -1, -1)
    by_query = _products(q, of_keys).gather(3, numbers)
    by_key = _products(k, of_queries).gather(3, numbers.transpose(2, 3)).transpose(2, 3)
    scores, q = (by_query + by_key) * (3 * q.shape[-1]) ** -0.5, q * 3**-0.5
    if not is_native(q.device, q.dtype):
        scores = scores.float()  # as `attend` multiplies
    if pattern.kernel == PLAIN:
        hiding = scores if pattern.hiding is None else scores + pattern.hiding
        return q, pattern._replace(hiding=hiding)
    if pattern.visible is not None:
        scores = scores.masked_fill(~pattern.visible, torch.finfo(scores.dtype).min / 2)
    return q, pattern._replace(visible=scores)


def _products(x: Tensor, vectors: Tensor) -> Tensor:
    """x [B, A, L, D] with each of the vectors [A, R, D]: [B, A, L, R]."""
    if is_native(x.device, x.dtype):
        return x @ vectors.transpose(1, 2)
    with torch.autocast(x.device.type, enabled=False):
        return _products(x.float(), vectors.float()).to(x.dtype)
