"""Branches: a classifier after every layer, so that easy examples can leave early (FastBERT)."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention_kernel import PLAIN, AttentionPattern, attend, visible_keys
from model.model_config import ModelConfig
from model.precision import Dense

WIDTH, HEADS = 128, 2


class BranchDense(Dense):
    """A dense layer that begins with torch's own initial values, as in FastBERT's code."""


class Branch(nn.Module):
    """A classifier of one layer's states (FastBERT, arXiv 2004.02178; the sizes of its code).

    A dense layer to 128 with tanh, self-attention of 2 heads, of which only the first token's
    output is computed, a dense layer with tanh, and a dense layer to the labels.
    """

    def __init__(self, config: ModelConfig, labels: int) -> None:
        super().__init__()
        self.narrow = BranchDense(config.hidden_size, WIDTH)
        self.query = BranchDense(WIDTH, WIDTH)
        self.key = BranchDense(WIDTH, WIDTH)
        self.value = BranchDense(WIDTH, WIDTH)
        self.output = BranchDense(WIDTH, WIDTH)
        self.dense = BranchDense(WIDTH, WIDTH)
        self.linear = BranchDense(WIDTH, labels)
        self.dropout = config.dropout_rate("attention")

    def forward(self, states: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Map states [B, L, H] to logits [B, labels]; the mask as in `visible_keys`."""
        x = torch.tanh(self.narrow(states))
        q, k, v = _split(self.query(x[:, :1])), _split(self.key(x)), _split(self.value(x))
        visible = visible_keys(attention_mask, x.shape[1], 0, x.device)
        dropout = self.dropout if self.training else 0.0
        pattern = AttentionPattern.of(PLAIN, visible, q.dtype)
        mixed = attend(q, k, v, pattern, dropout)  # [B, heads, 1, D]
        first = torch.tanh(self.dense(self.output(mixed.flatten(1))))
        return self.linear(first)


class BranchedHead(nn.Module):
    """A branch after every layer; that of the last layer is the teacher of the others."""

    def __init__(self, config: ModelConfig, labels: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(config, labels) for _ in range(config.layers - 1))
        self.last = Branch(config, labels)

    def __iter__(self) -> Iterator[nn.Module]:
        """The branches in the order of the layers, the last one included."""
        yield from self.branches
        yield self.last

    def earlier(self, states: Sequence[Tensor], attention_mask: Tensor | None) -> Tensor:
        """The logits [layers - 1, B, labels] of all branches but the last.

        states: the output [B, L, H] of each layer but the last. It is detached: a branch never
        trains the layers.
        """
        pairs = zip(self.branches, states, strict=True)
        return torch.stack([branch(state.detach(), attention_mask) for branch, state in pairs])


def uncertainty(logits: Tensor) -> Tensor:
    """The entropy of softmax(logits [B, K]) over ln K, float32 [B]: 0 is certain, 1 is uniform."""
    log_p = F.log_softmax(logits.float(), dim=-1)
    return -(log_p.exp() * log_p).sum(dim=-1) / math.log(logits.shape[-1])


def _split(x: Tensor) -> Tensor:
    """[B, L, 128] to [B, heads, L, D]."""
    return x.unflatten(2, (HEADS, WIDTH // HEADS)).transpose(1, 2)
