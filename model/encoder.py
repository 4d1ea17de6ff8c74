"""The stack of layers, with what is captured on the way, and the attention half of a layer."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model.attention_kernel import (
    VARLEN,
    AttentionPattern,
    attend,
    attention_pattern,
    with_positions,
)
from model.config import EncoderConfig
from model.documents import AttentionMask, Documents, Padded, RealTokens, without_count
from model.parts import DenseNorm, FeedForwardStack, RelativePositions, RMSNorm, make_norm
from model.precision import Dense, product_dtype
from model.protocol import QKV, Capture, Encoded


def rotary_angles(length: int, head_size: int, theta: float, device: torch.device) -> Tensor:
    """Cosines and sines of rotary positions (arXiv 2104.09864), float32 [2, L, head_size]."""
    exponent = torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size
    position = torch.arange(length, dtype=torch.float32, device=device)
    angles = position[:, None] * (1.0 / theta**exponent)
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary positions to x [B, A, L, D] in float32; the result has x's dtype.

    `angles` are those of `rotary_angles`, or of each row [2, B, 1, L, D]. They get no gradient.
    """
    return _Rotation.apply(x, angles)


class _Rotation(torch.autograd.Function):
    """A rotation, whose gradient is the rotation back: half of the passes that autograd makes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        return _turned(x, *angles)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (gradient,), ((cosines, sines),) = upstream, ctx.saved_tensors
        return _turned(gradient, cosines, -sines), None


def _turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    swapped = torch.cat([second, first], dim=-1)
    first_sines, second_sines = sines.chunk(2, dim=-1)
    swapped.mul_(torch.cat([-first_sines, second_sines], dim=-1))
    return swapped.add_(wide * cosines).to(x.dtype)


def at_rows(x: Tensor, rows: Tensor) -> Tensor:
    """The vectors [P, H] of x [B, L, H] at flat positions int64 [P]."""
    return x.flatten(0, 1).index_select(0, rows)


class Bottleneck(nn.Module):
    """MobileBERT's bottleneck: it narrows the input of a layer.

    Returns the input of Q and K, the input of V, and the residual inside the layer.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.source = config.bottleneck_attention
        self.input = DenseNorm(config, config.hidden_size, config.bottleneck_size, 0.0)
        self.shared = None
        if self.source == "shared":
            self.shared = DenseNorm(config, config.hidden_size, config.bottleneck_size, 0.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map [B, L, hidden] to (for Q and K, for V, residual [B, L, inner])."""
        inner = self.input(x)
        if self.source == "inner":
            return inner, inner, inner
        return (x if self.shared is None else self.shared(x)), x, inner


class Attention(nn.Module):
    """The attention half of a layer, with its norm and residual."""

    def __init__(self, config: EncoderConfig, is_first: bool) -> None:
        super().__init__()
        self.config, self.is_pre_norm = config, config.norm_placement == "pre"
        self.joins_projections = False  # whether Q, K and V are one product: faster if compiled
        inner, hidden, bias = config.inner_size, config.hidden_size, config.attention_bias
        query_input = hidden if config.bottleneck_attention == "hidden" else inner
        value_input = inner if config.bottleneck_attention == "inner" else hidden
        self.bottleneck = Bottleneck(config) if config.bottleneck_size else None
        self.query = Dense(query_input, inner, bias=bias)
        self.head_size = config.head_size
        of_keys = config.key_value_heads * self.head_size
        self.key = Dense(query_input, of_keys, bias=bias)
        self.value = Dense(value_input, of_keys, bias=bias)
        self.output = Dense(inner, inner, bias=bias)
        self.query_norm = self.key_norm = None
        if config.qk_norm:
            self.query_norm = RMSNorm(self.head_size, eps=config.norm_eps)
            self.key_norm = RMSNorm(self.head_size, eps=config.norm_eps)
        skip_norm = is_first and config.lacks_first_norm
        self.norm = None if skip_norm else make_norm(config, inner)
        rate = 0.0 if config.bottleneck_size else config.dropout_rate("attention_output")
        self.dropout = nn.Dropout(rate)
        self.attention_dropout = config.dropout_rate("attention")

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Map x [B, L, hidden] to y [B, L, inner] and q, k, v [B, A, L, D] each.

        Where the pattern has `tokens`, x is [1, T, hidden] and y [1, T, inner]; q, k and v are of
        [1, A, T, D] unless the tokens are `copied` into their rows. `angles`, as in
        `rotate`, turn q and k if positions are rotary. With `rows` int64 [P], flat indices into x's
        positions, y is computed at these positions only: [P, inner].
        """
        entry = self.norm(x) if self.is_pre_norm and self.norm is not None else x
        query_input, value_input, residual = entry, entry, x
        if self.bottleneck is not None:
            query_input, value_input, residual = self.bottleneck(x)
        projections, copied = self._projections(query_input, value_input), pattern.copied
        if copied is not None:
            projections = [copied.pad(x) for x in projections]
        q, k, v = map(self._split, projections)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q).to(v.dtype), self.key_norm(k).to(v.dtype)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        if k.shape[1] < q.shape[1]:  # each head of keys and values is read by a group of heads
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        if pattern.distances is not None:
            vectors = self.dropout(pattern.distances.vectors)[None]
            of_keys, of_queries = (self._split(part(vectors))[0] for part in (self.key, self.query))
            q, pattern = with_positions(q, k, of_keys, of_queries, pattern)
        dropout = self.attention_dropout if self.training else 0.0
        mixed = attend(q, k, v, pattern, dropout).transpose(1, 2).flatten(2)
        if copied is not None:
            mixed = copied.unpad(mixed)
        if rows is not None:
            mixed, residual = at_rows(mixed, rows), at_rows(residual, rows)
        y = residual + self.dropout(self.output(mixed))
        if not self.is_pre_norm and self.norm is not None:
            y = self.norm(y)
        return y, q, k, v

    def _projections(self, query_input: Tensor, value_input: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values of all heads, [B, L, A * D] each.

        Joined, their weights are packed as autocast casts them, and are one product.
        """
        parts = self.query, self.key, self.value
        if not self.joins_projections or query_input is not value_input:
            return self.query(query_input), self.key(query_input), self.value(value_input)
        biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
        weights: list[Tensor] = [part.weight for part in parts]
        bias = torch.cat(biases) if biases else None
        joined = self.query.product(query_input, torch.cat(weights), bias)
        return joined.split([part.out_features for part in parts], dim=-1)

    def _split(self, x: Tensor) -> Tensor:
        """[B, L, A * D] to [B, A, L, D]."""
        return x.unflatten(2, (-1, self.head_size)).transpose(1, 2)


Seen = tuple[AttentionPattern, Tensor | None]  # the pattern and the rotary angles of a layer
Context = tuple[Seen, Seen]  # of the global layers, and of the local ones


def run_layer(
    attention: nn.Module,
    feed_forward: nn.Module,
    x: Tensor,
    pattern: AttentionPattern,
    angles: Tensor | None,
    rows: Tensor | None,
    captured: int,
) -> tuple[Tensor, ...]:
    """Both halves of a layer: x [B, L, H] to the next x and the first `captured` of q, k and v.

    With `rows`, as in `Attention.forward`, the next x is [P, H]. q, k and v are [B, A, L, D]; a
    compiled backward pass would fill gradients with zeros for such as nobody reads.
    """
    y, q, k, v = attention(x, pattern, angles, rows)
    layer_input = x if rows is None else at_rows(x, rows)
    y = feed_forward(y, layer_input)
    return (y, q, k, v)[: 1 + captured]


class Encoder(nn.Module):
    """Layers made of an attention and a feed-forward half, either of which may be shared.

    ``attention.I`` and ``feed_forward.I`` hold each set of weights once; the sharing plan says
    which of them a layer uses. With `checkpoint_activations` a layer keeps only its input for
    the backward pass and is computed again there.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.checkpoint_activations = self.is_compiled = False
        self._run_layer = run_layer
        self.rope_theta = config.global_rope_theta  # of the global layers; a job's phases change it
        self.attention_dropout = config.dropout_rate("attention")
        self.head_size = config.head_size
        self.relative = RelativePositions(config) if config.positions == "relative" else None
        self.is_local = [config.is_local(i) for i in range(config.layers)]  # by layer
        self.attention_plan = config.layer_units("attention")
        self.feed_forward_plan = config.layer_units("feed_forward")
        self.attention = nn.ModuleList(
            Attention(config, is_first=i == 0) for i in range(self.attention_plan[-1] + 1)
        )
        self.feed_forward = nn.ModuleList(
            FeedForwardStack(config) for _ in range(self.feed_forward_plan[-1] + 1)
        )
        self.final_norm = (
            make_norm(config, config.hidden_size) if config.norm_placement == "pre" else None
        )

    def forward(
        self,
        x: Tensor,
        attention_mask: AttentionMask | Padded | None,
        capture: Capture,
        last_rows: Tensor | None = None,
    ) -> Encoded:
        """Run the layers on x [B, L, H]; `attention_mask` as in `visible_keys`, or `Padded`.

        With `last_rows` int64 [P] the last layer ends at these flat positions of B * L only, and
        the last hidden state is [P, H].
        """
        context = self.context(x, without_count(attention_mask))
        copies, tokens = context[0][0].kernel != VARLEN, None
        if isinstance(attention_mask, Padded):
            tokens = RealTokens.where_it_pays(attention_mask, x, copies)
        if tokens is None:
            return self._run_layers(x, context, capture, last_rows)
        context = _on_tokens(context[0], tokens), _on_tokens(context[1], tokens)
        places = None if last_rows is None else tokens.places(last_rows)
        last, states, attention = self._run_layers(tokens.unpad(x), context, capture, places)
        return Encoded(
            tokens.pad(last) if places is None else last,
            {number: tokens.pad(state) for number, state in states.items()},
            attention if copies else {i: _in_rows(qkv, tokens) for i, qkv in attention.items()},
        )

    def _run_layers(
        self, x: Tensor, context: Context, capture: Capture, last_rows: Tensor | None
    ) -> Encoded:
        """All layers, on x [B, L, H] or on the real tokens [1, T, H] of the context's patterns."""
        hidden_states = {0: x} if 0 in capture.hidden_states else {}
        attention: dict[int, QKV] = {}
        for number in range(1, self.config.layers + 1):
            rows = last_rows if number == self.config.layers else None
            captured = (2 + capture.values) * (number in capture.attention)
            x, *qkv = self.layer(number, x, context, rows, captured)
            if qkv:
                attention[number] = QKV(*qkv)
            if number in capture.hidden_states:
                hidden_states[number] = x
        return Encoded(x, hidden_states, attention)

    def layer(
        self,
        number: int,
        x: Tensor,
        context: Context,
        rows: Tensor | None = None,
        captured: int = 0,
    ) -> tuple[Tensor, ...]:
        """Run a layer, from 1, in the context of its batch; returns as `run_layer`.

        The output of the last layer is that of the final norm.
        """
        pattern, angles = context[self.is_local[number - 1]]
        attention = self.attention[self.attention_plan[number - 1]]
        feed_forward = self.feed_forward[self.feed_forward_plan[number - 1]]
        if self.is_compiled and pattern.tokens is not None:
            pattern.tokens.share_code(x, angles)
        run: Callable[..., Any] = partial(self._run_layer, attention, feed_forward)
        if self.checkpoint_activations and self.training:
            run = partial(checkpoint, run, use_reentrant=False)
        x, *qkv = run(x, pattern, angles, rows, captured)
        if self.final_norm is not None and number == self.config.layers:
            x = self.final_norm(x)
        return x, *qkv

    def run_layers_by(self, run: Callable[..., tuple[Tensor, ...]]) -> None:
        """Run layers by `run`, as in `Model.run_layers_by`."""
        plans = {*self.attention_plan}, {*self.feed_forward_plan}
        is_shared = any(len(plan) < self.config.layers for plan in plans)
        if not is_shared and not self.checkpoint_activations:
            self._run_layer = partial(run, run_layer)

    def compile_layers(self, **options: Any) -> None:
        """Run layers through ``torch.compile`` with these options; those of equal shape share code.

        The modules stay as they are: names, hooks and checkpointing.
        """
        self._run_layer = torch.compile(run_layer, **options)
        for attention in self.attention:
            assert isinstance(attention, Attention)
            attention.joins_projections = True
        self.is_compiled = True

    def context(self, x: Tensor, attention_mask: AttentionMask | None) -> Context:
        """The attention patterns of the global and of the local layers, and their rotary angles."""
        config, (rows, length, _) = self.config, x.shape
        if self.is_compiled and isinstance(attention_mask, Documents):
            attention_mask = attention_mask._replace(sizes=())  # each batch would be compiled anew
        operands = (x.device, product_dtype(x))
        dropout = self.attention_dropout if self.training else 0.0
        distances = None if self.relative is None else self.relative(length)
        kinds, contexts = [(0, self.rope_theta)], []
        if any(self.is_local):
            kinds.append((config.local_window, config.local_rope_theta))
        for window, theta in kinds:
            pattern = attention_pattern(
                *(attention_mask, window, (rows, length), self.head_size, operands, dropout),
                distances,
            )
            angles = None
            if config.positions == "rotary":
                angles = rotary_angles(length, self.head_size, theta, x.device)
                if isinstance(attention_mask, Documents):  # [2, B, 1, L, D]
                    angles = angles[:, attention_mask.places][:, :, None]
            contexts.append((pattern, angles))
        return contexts[0], contexts[-1]


def _on_tokens(seen: Seen, tokens: RealTokens) -> Seen:
    """The pattern and the angles of layers that compute only these tokens."""
    pattern, angles = seen[0].on(tokens), seen[1]
    if angles is not None and pattern.copied is None:
        angles = angles[:, tokens.columns]
    return pattern, angles


def _in_rows(qkv: QKV, tokens: RealTokens) -> QKV:
    """[B, A, L, D] each, of [1, A, T, D]; 0 at padding."""
    padded = (tokens.pad(x.transpose(1, 2)).transpose(1, 2) for x in qkv if x is not None)
    return QKV(*padded)
