"""Building blocks: norms, activations, dense layers with a residual, and the feed-forward part."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import EncoderConfig
from model.precision import Dense


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU (arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


class NoNorm(nn.Module):
    """MobileBERT's replacement for a norm, an element-wise affine map: ``weight * x + bias``."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., size] to [..., size]."""
        return x * self.weight + self.bias


class LayerNorm(nn.LayerNorm):
    """A layer norm, whose result has the dtype of its weights where that is 16 bit.

    So the residual stream does. On GPUs autocast alone would make it float32. The kernels compute
    statistics in float32.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., size] to [..., size]."""
        if self.weight.dtype.itemsize > 2:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.weight.dtype))


class RMSNorm(nn.RMSNorm):
    """``g * x / rms(x)`` (arXiv 1910.07467), in float32 under autocast, as layer norms are.

    The result has the dtype of the weights where that is 16 bit.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., size] to [..., size]."""
        wide = x.float() if torch.is_autocast_enabled(x.device.type) else x
        if self.weight.dtype.itemsize > 2:
            return super().forward(wide)
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.to(self.weight.dtype))


def make_norm(config: EncoderConfig, size: int, eps: float = 0.0) -> nn.Module:
    """The configured norm over the last dimension; an `eps` of 0 means the configured epsilon."""
    if config.norm == "no_norm":
        return NoNorm(size)
    if config.norm == "rms_norm":
        return RMSNorm(size, eps=eps or config.norm_eps)
    return LayerNorm(size, eps=eps or config.norm_eps, bias=config.norm_bias)


class DenseNorm(nn.Module):
    """``norm(dropout(dense(x)) + residual)``; without a residual ``norm(dense(x))``."""

    def __init__(self, config: EncoderConfig, inputs: int, outputs: int, dropout: float) -> None:
        super().__init__()
        self.dense = Dense(inputs, outputs)
        self.norm = make_norm(config, outputs)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Map x [..., inputs] and residual [..., outputs] to [..., outputs]."""
        y = self.dropout(self.dense(x))
        return self.norm(y if residual is None else y + residual)


class FeedForward(nn.Module):
    """Two dense layers with an activation or a gated unit, a norm and a residual.

    If a layer has several, only the last has dropout. Inside a bottleneck none has (MobileBERT).
    """

    def __init__(self, config: EncoderConfig, is_last: bool) -> None:
        super().__init__()
        self.config = config
        self.gated = config.feed_forward == "glu"
        inner = config.inner_size
        self.input = Dense(inner, config.ffn_size * (2 if self.gated else 1), bias=config.ffn_bias)
        self.output = Dense(config.ffn_size, inner, bias=config.ffn_bias)
        self.norm = make_norm(config, inner, config.fixed_norm_eps if is_last else 0.0)
        drops = is_last and not config.bottleneck_size
        self.dropout = nn.Dropout(config.dropout_rate("feed_forward") if drops else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, L, inner] to [B, L, inner]."""
        if self.config.norm_placement == "pre":
            return x + self._transform(self.norm(x))
        return self.norm(x + self._transform(x))

    def _transform(self, x: Tensor) -> Tensor:
        activation = ACTIVATIONS[self.config.activation]
        if not self.gated:
            return self.dropout(self.output(activation(self.input(x))))
        value, gate = self.input(x).chunk(2, dim=-1)
        return self.output(self.dropout(activation(value) * gate))


class FeedForwardStack(nn.Module):
    """All feed-forward networks of a layer, and the projection out of its bottleneck."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        last = config.feed_forwards - 1
        self.stack = nn.ModuleList(
            FeedForward(config, is_last=i == last) for i in range(config.feed_forwards)
        )
        self.widen = None
        if config.bottleneck_size:
            rate = config.dropout_rate("feed_forward")
            self.widen = DenseNorm(config, config.inner_size, config.hidden_size, rate)

    def forward(self, x: Tensor, layer_input: Tensor) -> Tensor:
        """Map x [B, L, inner] to [B, L, hidden]; `layer_input` [B, L, hidden] is the residual."""
        for feed_forward in self.stack:
            x = feed_forward(x)
        return x if self.widen is None else self.widen(x, layer_input)
