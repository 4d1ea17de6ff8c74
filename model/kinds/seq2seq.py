"""A sequence-to-sequence transformer: an encoder, and a decoder with attention to its states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs.rules import PROBABILITY, OneOf, Unit, positive
from configs.section import Refusal
from model.accounting import flops_per_token
from model.attention_kernel import AttentionPattern, attend, choose_kernel, visible_keys
from model.config import EncoderConfig
from model.encoder import Attention, Encoder
from model.heads import OutputBias, ProjectionParts, vocabulary_logits
from model.initialisation import fill
from model.model_config import REPEATS, WIDTH, Ability, ModelConfig, PaddingToken, VocabularySize
from model.parts import ACTIVATIONS, Embeddings, FeedForwardStack, Table, make_norm
from model.precision import is_native, kernel_device, product_dtype
from model.protocol import NOTHING, Capture, Encoded, Model, register

if TYPE_CHECKING:
    from typing import Self  # of Python 3.11 on


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
        dropout = self.attention_dropout if self.training else 0.0
        mixed = attend(q, *seen, pattern, dropout).transpose(1, 2).flatten(2)
        y = x + self.dropout(self.output(mixed))
        return y if self.is_pre_norm or self.norm is None else self.norm(y)


class Decoder(nn.Module):
    """Position embedding and layers, each of self-attention, cross-attention and feed-forward."""

    def __init__(self, config: EncoderConfig, layers: int) -> None:
        super().__init__()
        self.config, self.layers = config, layers
        self.position = Table(config.max_positions, config.hidden_size)
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
        x = words + self.position(slice(first, first + words.shape[1]))
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
        dtype = dtype if is_native(x.device, dtype) else torch.float32
        dropout = self.config.dropout_rate("attention") if self.training else 0.0
        longest, size = max(x.shape[1], length), self.config.head_size
        kernel = choose_kernel(device, dtype, longest, size, skips=False, dropout=dropout)
        return AttentionPattern.of(kernel, visible, dtype)


@dataclass
class Seq2SeqConfig(ModelConfig):
    """A transformer encoder-decoder (Vaswani et al., arXiv 1706.03762) in BART's form.

    Its parts are those of the encoder family. Encoder, decoder and output share the word vectors;
    positions are learned, each side its own. An example is two rows, the source and the target.
    """

    abilities: ClassVar[frozenset[Ability]] = frozenset({Ability.GENERATE})
    embedding_keys: ClassVar[tuple[str, ...]] = ("vocab_size", "hidden_size", "max_positions")

    kind: Annotated[str, OneOf("seq2seq"), "The kind of model."] = field(
        default="seq2seq", kw_only=True
    )
    vocab_size: VocabularySize = 30522
    hidden_size: Annotated[int, WIDTH, "Width of the hidden states."] = 512
    layers: Annotated[int, REPEATS, "Number of layers of the encoder."] = 6
    decoder_layers: Annotated[int, REPEATS, "Number of layers of the decoder."] = 6
    heads: Annotated[int, WIDTH, "Attention heads in each attention of a layer."] = 8
    ffn_size: Annotated[int, WIDTH, "Width inside a feed-forward network."] = 2048
    max_positions: Annotated[
        int, WIDTH, Unit("tokens"), "The longest source, and the longest target."
    ] = 512
    norm_placement: Annotated[
        str,
        OneOf("post", "pre"),
        "post: norms after each residual sum; pre: norms before each part.",
    ] = "post"
    norm_eps: Annotated[float, positive(1.0), "Added to the variance in a layer norm."] = 1e-5
    activation: Annotated[str, OneOf(*ACTIVATIONS), "Activation of the feed-forward networks."] = (
        "gelu"
    )
    pad_token_id: PaddingToken = 0
    dropout: Annotated[float, PROBABILITY, "Dropout probability, also of attention."] = 0.1
    initializer_range: Annotated[
        float, positive(100.0), "Standard deviation of random weights."
    ] = 0.02

    def conflicts(self) -> Iterator[Refusal]:
        if self.hidden_size % self.heads:
            yield "heads", f"{self.heads} does not divide the width {self.hidden_size}"
        yield from self.conflicts_without_heads()
        yield from super().conflicts()

    @property
    def part(self) -> EncoderConfig:
        """The encoder, and what a layer of the decoder is made of."""
        return EncoderConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            layers=self.layers,
            heads=self.heads,
            ffn_size=self.ffn_size,
            max_positions=self.max_positions,
            segment_types=0,
            pad_token_id=self.pad_token_id,
            norm_placement=self.norm_placement,
            norm_eps=self.norm_eps,
            activation=self.activation,
            pooler="none",
            mlm_head=False,
            dropout=self.dropout,
            attention_dropout=self.dropout,
            initializer="normal",
            initializer_range=self.initializer_range,
        )

    @property
    def longest_sequence(self) -> int:
        """The longest source, and the longest target, in tokens."""
        return self.max_positions

    def dropout_rate(self, place: str) -> float:
        """The one dropout probability, which applies to every part."""
        return self.dropout

    @property
    def description(self) -> str:
        """The sizes in words."""
        return (
            f"a sequence-to-sequence transformer of {self.layers} encoder and "
            f"{self.decoder_layers} decoder layers, hidden size {self.hidden_size}, {self.heads} "
            f"attention heads, {self.vocab_size:,} tokens in the vocabulary, up to "
            f"{self.max_positions} positions"
        )

    def without_attention_dropout(self) -> Self:
        """This configuration without dropout, which all parts share."""
        return replace(self, dropout=0.0)


@register(Seq2SeqConfig)
class Seq2Seq(Model):
    """Encoder and decoder. Rows come in pairs: of each example the source, then the target.

    A target is ``[CLS] y [SEP]``. The state at a position of the target is the one that predicts
    its token, from the tokens in front of it; that of [CLS] is 0.
    """

    config: Seq2SeqConfig
    head: OutputBias

    def __init__(self, config: Seq2SeqConfig) -> None:
        super().__init__()
        self.config, self.pooler = config, None
        self.embeddings = Embeddings(config.part)
        self.encoder = Encoder(config.part)
        self.decoder = Decoder(config.part, config.decoder_layers)
        self.head, self.pair_head, self.task_heads = OutputBias(config), None, nn.ModuleDict()

    def encode(
        self,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        capture: Capture = NOTHING,
        rows: Tensor | None = None,
    ) -> Encoded:
        """The states of B / 2 pairs, as in `Model.encode`; it captures the encoder's, [B / 2, ...].

        Padding must follow the tokens.
        """
        mask = None if attention_mask is None else attention_mask[0::2]
        source = self.encoder(self.embeddings(input_ids[0::2]), mask, capture)
        # The last token of a target predicts nothing, and nothing predicts the first.
        words = self.embeddings.word(input_ids[1::2, :-1])
        target = F.pad(self.decoder(words, source.last_hidden_state, mask), (0, 0, 1, 0))
        states = torch.stack([source.last_hidden_state, target], dim=1).flatten(0, 1)
        return source._replace(last_hidden_state=states).at(rows)

    def decoding(self, source_ids: Tensor, lengths: Tensor | None) -> CachedDecoding:
        source = self.encoder(self.embeddings(source_ids), lengths, NOTHING).last_hidden_state
        visible = visible_keys(lengths, source.shape[1], 0, source.device)
        return CachedDecoding(self, list(self.decoder.memory(source)), visible)

    def run_layers_by(self, run: Callable[..., tuple[Tensor, ...]]) -> None:
        self.encoder.run_layers_by(run)

    def projection_parts(self) -> ProjectionParts:
        return ProjectionParts(self.embeddings.word.weight, self.head.bias)

    def fill(
        self, module: nn.Module, key: str, name: str, parameter: Tensor, generator: torch.Generator
    ) -> None:
        fill(self.config.part, module, key, name, parameter, generator)

    def flops_per_token(self, length: int, masked_fraction: float) -> float:
        """The operations per token where source and target have `length` tokens each.

        A layer of the decoder also has the four projections and two products of cross-attention.
        """
        config = self.config
        layer = flops_per_token(replace(config.part, layers=1), length, 0.0)
        cross = 8 * config.hidden_size**2 + 4 * length * config.hidden_size
        layers = config.layers * layer + config.decoder_layers * (layer + cross)
        return layers / 2 + masked_fraction * 2 * config.hidden_size * config.vocab_size


class CachedDecoding:
    """The decoding of sources (`model.generation.Decoding`), with the keys and values so far."""

    def __init__(self, model: Seq2Seq, memory: list[KeysValues], visible: Tensor | None) -> None:
        """`visible`: the keys of the `memory` that are tokens, bool [N, 1, 1, S]; None: all."""
        self._model, self._memory, self._there = model, memory, visible
        self._past: list[KeysValues | None] = [None] * len(memory)

    def log_probabilities(self, tokens: Tensor) -> Tensor:
        words = self._model.embeddings.word(tokens)
        states, seen = self._model.decoder.step(words, self._past, self._memory, self._there)
        self._past = [*seen]
        logits = vocabulary_logits(states, *self._model.output_projection())
        return logits.float().log_softmax(dim=-1)

    def repeat(self, count: int) -> None:
        rows = torch.arange(len(self._memory[0].k), device=self._memory[0].k.device)
        rows = rows.repeat_interleave(count)
        self._memory = [keys_values.select(rows) for keys_values in self._memory]
        self._there = None if self._there is None else self._there.index_select(0, rows)
        self.select(rows)

    def select(self, rows: Tensor) -> None:
        self._past = [
            None if keys_values is None else keys_values.select(rows) for keys_values in self._past
        ]
