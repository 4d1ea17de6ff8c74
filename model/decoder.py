"""The decoder of a sequence-to-sequence model: layers that attend to a source too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.attention import Attention
from model.attention_kernel import AttentionPattern, attend, choose_kernel, visible_keys
from model.config import EncoderConfig
from model.embedding import PositionTable
from model.parts import FeedForwardStack, make_norm
from model.precision import is_native, kernel_device, product_dtype


class KeysValues(NamedTuple):
    """The keys and values of an attention, [B, A, L, D] each."""

    k: Tensor
    v: Tensor

    def with_next(self, other: KeysValues) -> KeysValues:
        """These, and the positions of `other` behind them."""
        return KeysValues(torch.cat([self.k, other.k], 2), torch.cat([self.v, other.v], 2))

    def select(self, rows: Tensor) -> KeysValues:
        """These rows, int64 [N]."""
        return KeysValues(self.k.index_select(0, rows), self.v.index_select(0, rows))


class DecoderAttention(Attention):
    """The attention half of a layer, whose keys and values may come from other states."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config, is_first=False)

    def entry(self, x: Tensor) -> Tensor:
        """The input of the projections, from the layer's input x [B, L, H]."""
        return self.norm(x) if self.is_pre_norm and self.norm is not None else x

    def keys_and_values(self, states: Tensor) -> KeysValues:
        """Keys and values of states [B, L, H]."""
        return KeysValues(self._split(self.key(states)), self._split(self.value(states)))

    def attend_to(self, x: Tensor, seen: KeysValues, pattern: AttentionPattern) -> Tensor:
        """Map x [B, L, H] to [B, L, H]; queries of x attend to what is `seen`."""
        q = self._split(self.query(self.entry(x)))
        dropout = self.config.dropout_rate("attention") if self.training else 0.0
        mixed = attend(q, *seen, pattern, dropout).transpose(1, 2).flatten(2)
        y = x + self.dropout(self.output(mixed))
        return y if self.is_pre_norm or self.norm is None else self.norm(y)

    @property
    def is_pre_norm(self) -> bool:
        """Whether the norm stands before the projections, not after the residual sum."""
        return self.config.norm_placement == "pre"


class Decoder(nn.Module):
    """Position embedding and layers, each of self-attention, cross-attention and feed-forward."""

    def __init__(self, config: EncoderConfig, layers: int) -> None:
        super().__init__()
        self.config, self.layers = config, layers
        self.position = PositionTable(config.max_positions, config.hidden_size)
        self.norm = make_norm(config, config.hidden_size) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout_rate("embedding"))
        self.self_attention = nn.ModuleList(DecoderAttention(config) for _ in range(layers))
        self.cross_attention = nn.ModuleList(DecoderAttention(config) for _ in range(layers))
        self.feed_forward = nn.ModuleList(FeedForwardStack(config) for _ in range(layers))
        is_pre_norm = config.norm_placement == "pre"
        self.final_norm = make_norm(config, config.hidden_size) if is_pre_norm else None

    def forward(self, words: Tensor, source: Tensor, source_mask: Tensor | None) -> Tensor:
        """The states [B, T, H] of a whole target: state t depends on its words 0 to t.

        words: the target's word vectors [B, T, H]; source: the encoder's states [B, S, H], with
        `source_mask` as in `visible_keys`.
        """
        length, device = words.shape[1], words.device
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()[None, None]
        visible = visible_keys(source_mask, source.shape[1], 0, device)
        x = self.embed(words, 0)
        inner, cross = (self._pattern(x, source.shape[1], keys) for keys in (causal, visible))
        for number, memory in enumerate(self.memory(source)):
            x, _ = self._layer(number, x, None, memory, (inner, cross))
        return x if self.final_norm is None else self.final_norm(x)

    def memory(self, source: Tensor) -> Iterator[KeysValues]:
        """Yield each layer's keys and values of the encoder's states [B, S, H]."""
        for cross in self.cross_attention:
            assert isinstance(cross, DecoderAttention)
            yield cross.keys_and_values(source)

    def step(
        self,
        words: Tensor,
        past: Sequence[KeysValues | None],
        memory: Sequence[KeysValues],
        visible: Tensor | None,
    ) -> tuple[Tensor, list[KeysValues]]:
        """The states [B, H] of one more word of each row, and what the next step is to get as past.

        words [B, H]; `visible`: the keys of the `memory` that may be seen, as from `visible_keys`.
        """
        place = 0 if past[0] is None else past[0].k.shape[2]
        x = self.embed(words[:, None], place)
        inner, cross = (self._pattern(x, memory[0].k.shape[2], keys) for keys in (None, visible))
        seen = []
        for number in range(self.layers):
            x, keys_values = self._layer(number, x, past[number], memory[number], (inner, cross))
            seen.append(keys_values)
        return (x if self.final_norm is None else self.final_norm(x))[:, 0], seen

    def embed(self, words: Tensor, first: int) -> Tensor:
        """Word vectors [B, L, H] at the positions from `first` on, with norm and dropout."""
        x = words + self.position(first + words.shape[1])[first:]
        return self.dropout(x if self.norm is None else self.norm(x))

    def _layer(
        self,
        number: int,
        x: Tensor,
        past: KeysValues | None,
        memory: KeysValues,
        patterns: tuple[AttentionPattern, AttentionPattern],
    ) -> tuple[Tensor, KeysValues]:
        attention, cross = self.self_attention[number], self.cross_attention[number]
        assert isinstance(attention, DecoderAttention)
        assert isinstance(cross, DecoderAttention)
        seen = attention.keys_and_values(attention.entry(x))
        seen = seen if past is None else past.with_next(seen)
        x = attention.attend_to(x, seen, patterns[0])
        x = cross.attend_to(x, memory, patterns[1])
        return self.feed_forward[number](x, x), seen

    def _pattern(self, x: Tensor, length: int, visible: Tensor | None) -> AttentionPattern:
        """Sources and targets share the kernel; the longer of both decides which it is."""
        dtype, device = product_dtype(x), kernel_device(x.device)
        dtype = dtype if is_native(device, dtype) else torch.float32
        dropout = self.config.dropout_rate("attention") if self.training else 0.0
        longest, size = max(x.shape[1], length), self.config.head_size
        kernel = choose_kernel(device, dtype, longest, size, skips=False, dropout=dropout)
        return AttentionPattern.of(kernel, visible, dtype)
