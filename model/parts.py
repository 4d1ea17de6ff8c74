"""Building blocks: norms, activations, and dense layers with a residual."""

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


def make_norm(config: EncoderConfig, size: int, eps: float = 0.0) -> nn.Module:
    """The configured norm over the last dimension; an `eps` of 0 means the configured epsilon."""
    if config.norm == "no_norm":
        return NoNorm(size)
    return nn.LayerNorm(size, eps=eps or config.norm_eps, bias=config.norm_bias)


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
