"""Attention pooling: the mean of a text's states, by weights that are learnt."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from configs.rules import OneOf, Range
from model.precision import Dense
from model.task_head_config import HEAD_KIND, WIDEST, HeadModuleConfig, register_head


@register_head
@dataclass
class AttentionPoolingConfig(HeadModuleConfig):
    """Attention over the tokens (Yang et al., 2016, aclanthology.org/N16-1174).

    With the states h, ``weights = softmax(v . tanh(W h + b))`` over a text's tokens; the output
    layer reads the mean of the states by these weights.
    """

    kind: Annotated[str, OneOf("attention_pooling"), HEAD_KIND] = "attention_pooling"
    pools: ClassVar[bool] = True
    width: Annotated[int, Range(1, WIDEST), "Width of the hidden layer that scores a token."] = 128

    def build(self, size: int, outputs: int) -> nn.Module:
        return AttentionPooling(self.width, size, outputs)


class AttentionPooling(nn.Module):
    """Scores each token, and reads the mean of the states by the softmax of the scores."""

    def __init__(self, width: int, size: int, outputs: int) -> None:
        super().__init__()
        self.hidden, self.score = Dense(size, width), Dense(width, 1, bias=False)
        self.output = Dense(size, outputs)

    def forward(self, states: Tensor, mask: Tensor | None) -> Tensor:
        """Map states [B, L, size] to [B, outputs]."""
        scores = self.score(self.hidden(states).tanh()).squeeze(-1).float()
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1).to(states.dtype)
        return self.output((weights[:, None] @ states).squeeze(1))
