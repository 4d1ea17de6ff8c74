"""The attention half of a layer: bottleneck, projections, rotary positions, norm and residual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from model.attention_kernel import AttentionPattern, attend
from model.config import EncoderConfig
from model.parts import DenseNorm, RMSNorm, make_norm
from model.precision import Dense


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
        self.config = config
        self.joins_projections = False  # whether Q, K and V are one product: faster if compiled
        inner, hidden, bias = config.inner_size, config.hidden_size, config.attention_bias
        query_input = hidden if config.bottleneck_attention == "hidden" else inner
        value_input = inner if config.bottleneck_attention == "inner" else hidden
        self.bottleneck = Bottleneck(config) if config.bottleneck_size else None
        self.query = Dense(query_input, inner, bias=bias)
        of_keys = config.key_value_heads * config.head_size
        self.key = Dense(query_input, of_keys, bias=bias)
        self.value = Dense(value_input, of_keys, bias=bias)
        self.output = Dense(inner, inner, bias=bias)
        self.query_norm = self.key_norm = None
        if config.qk_norm:
            self.query_norm = RMSNorm(config.head_size, eps=config.norm_eps)
            self.key_norm = RMSNorm(config.head_size, eps=config.norm_eps)
        skip_norm = is_first and config.lacks_first_norm
        self.norm = None if skip_norm else make_norm(config, inner)
        rate = 0.0 if config.bottleneck_size else config.dropout_rate("attention_output")
        self.dropout = nn.Dropout(rate)

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
        pre_norm = self.config.norm_placement == "pre"
        entry = self.norm(x) if pre_norm and self.norm is not None else x
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
        dropout = self.config.dropout_rate("attention") if self.training else 0.0
        mixed = attend(q, k, v, pattern, dropout).transpose(1, 2).flatten(2)
        if copied is not None:
            mixed = copied.unpad(mixed)
        if rows is not None:
            mixed, residual = at_rows(mixed, rows), at_rows(residual, rows)
        y = residual + self.dropout(self.output(mixed))
        if not pre_norm and self.norm is not None:
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
        return x.unflatten(2, (-1, self.config.head_size)).transpose(1, 2)
