"""The pooled state of an encoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.config import EncoderConfig
from model.precision import Dense


class Pooler(nn.Module):
    """The first token's state, through a dense layer and tanh where configured."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = None
        if config.pooler == "tanh":
            self.dense = Dense(config.hidden_size, config.hidden_size)

    def forward(self, first: Tensor) -> Tensor:
        """Map the first token's state [B, H] to [B, H]."""
        return first if self.dense is None else torch.tanh(self.dense(first))
