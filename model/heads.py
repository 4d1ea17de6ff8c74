"""Pooling and the transform before the vocabulary projection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.config import EncoderConfig
from model.parts import ACTIVATIONS
from model.precision import Dense


class Pooler(nn.Module):
    """The first token's state, through a dense layer and tanh where configured."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = None
        if config.pooler == "tanh":
            self.dense = Dense(config.hidden_size, config.hidden_size)

    def forward(self, last_hidden_state: Tensor) -> Tensor:
        """Map [B, L, H] to [B, H]."""
        first = last_hidden_state[:, 0]
        return first if self.dense is None else torch.tanh(self.dense(first))


class MaskedLanguageModelHead(nn.Module):
    """Dense layer, activation and norm before the vocabulary projection, and its own parameters.

    The projection's weight is the word embedding. MobileBERT's is narrower than its input: the
    columns that are missing are ``extra`` [hidden - embedding, V].
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width = config.vocabulary_input_size
        self.activation = ACTIVATIONS[config.head_activation or config.activation]
        self.dense = Dense(config.hidden_size, width, bias=config.head_bias)
        self.norm = nn.LayerNorm(width, eps=config.norm_eps, bias=config.norm_bias)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.decoder_bias else None
        self.extra = None
        if width > config.word_size:
            self.extra = nn.Parameter(torch.zeros(width - config.word_size, config.vocab_size))

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states [..., H] to the vocabulary projection's input [..., E]."""
        return self.norm(self.activation(self.dense(x)))
