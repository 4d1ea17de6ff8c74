"""A recurrent encoder-decoder with attention, the student of C-MLM (arXiv 1911.03829)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs.rules import PROBABILITY, OneOf, positive
from configs.section import Refusal
from model.attention_kernel import visible_keys
from model.heads import OutputBias, ProjectionParts, vocabulary_logits
from model.initialisation import zero_padding
from model.kinds import bilstm
from model.kinds.bilstm import BothDirections, WordVectors
from model.model_config import REPEATS, WIDTH, Ability, ModelConfig, PaddingToken, VocabularySize
from model.precision import Dense
from model.protocol import NOTHING, Capture, Encoded, Model, register


@dataclass
class RecurrentSeq2SeqConfig(ModelConfig):
    """A bidirectional LSTM, and an LSTM with attention to its states (Luong et al., 1508.04025).

    Both have the same number of layers; a layer of the decoder begins with the last states of the
    encoder's layer. The attention is Luong's `general` form. Both sides and the output share the
    word vectors. Texts may have any length. An example is two rows, the source and the target.
    """

    abilities: ClassVar[frozenset[Ability]] = frozenset({Ability.GENERATE})
    embedding_keys: ClassVar[tuple[str, ...]] = ("vocab_size", "hidden_size")

    kind: Annotated[str, OneOf("recurrent_seq2seq"), "The kind of model."] = field(
        default="recurrent_seq2seq", kw_only=True
    )
    vocab_size: VocabularySize = 30522
    hidden_size: Annotated[
        int, WIDTH, "Width of word vectors and states; each direction has half of it."
    ] = 512
    layers: Annotated[int, REPEATS, "Number of layers of encoder and decoder each."] = 2
    pad_token_id: PaddingToken = 0
    dropout: Annotated[
        float, PROBABILITY, "Dropout probability between layers, and of the decoder's output."
    ] = 0.3
    initializer_range: Annotated[
        float, positive(100.0), "Weights and biases begin uniform in +- this."
    ] = 0.1

    def conflicts(self) -> Iterator[Refusal]:
        if self.hidden_size % 2:
            yield "hidden_size", f"{self.hidden_size} must be even: each direction has half of it"
        yield from self.conflicts_without_heads()
        yield from super().conflicts()

    def dropout_rate(self, place: str) -> float:
        """The one dropout probability."""
        return self.dropout

    @property
    def description(self) -> str:
        """The sizes in words."""
        return (
            f"a recurrent encoder-decoder with attention, {self.layers} layers each, hidden size "
            f"{self.hidden_size}, {self.vocab_size:,} tokens in the vocabulary"
        )


class _Source(NamedTuple):
    """A source as the decoder sees it: states [B, S, H], keys [B, S, H] and which are tokens."""

    states: Tensor
    keys: Tensor
    is_token: Tensor | None  # bool [B, 1, S]; None: all

    def select(self, rows: Tensor) -> _Source:
        """These rows, int64 [N]."""
        is_token = None if self.is_token is None else self.is_token.index_select(0, rows)
        return _Source(self.states[rows], self.keys[rows], is_token)


class RecurrentEncoder(nn.Module):
    """The layers that read a source in both directions."""

    def __init__(self, config: RecurrentSeq2SeqConfig) -> None:
        super().__init__()
        self.lstm = nn.ModuleList(BothDirections(config) for _ in range(config.layers))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, reverse: Tensor) -> list[Tensor]:
        """Map x [B, S, H] to itself and the states [B, S, H] after each layer."""
        states = [x]
        for layer in self.lstm:
            states.append(layer(self.dropout(states[-1]), reverse))
        return states


class RecurrentDecoder(nn.Module):
    """The layers that write a target, and the attention of the last one to the source."""

    def __init__(self, config: RecurrentSeq2SeqConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.lstm = nn.ModuleList(
            nn.LSTM(size, size, batch_first=True) for _ in range(config.layers)
        )
        self.key = Dense(size, size, bias=False)
        self.output = Dense(2 * size, size, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def source(self, states: Tensor, attention_mask: Tensor | None) -> _Source:
        """The source for attention, of the encoder's last states [B, S, H]; mask as in `encode`."""
        visible = visible_keys(attention_mask, states.shape[1], 0, states.device)
        return _Source(states, self.key(states), None if visible is None else visible[:, 0])

    def forward(
        self, words: Tensor, source: _Source, past: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The states [B, T, H] behind each of the words [B, T, H], and each layer's last ones."""
        x, last = words, []
        for layer, state in zip(self.lstm, past, strict=True):
            with torch.autocast(x.device.type, enabled=False):  # as in `BothDirections`
                x, state = layer(self.dropout(x).to(state[0].dtype), state)
            last.append(state)
        scores = (x @ source.keys.float().transpose(1, 2)).float()
        if source.is_token is not None:
            scores = scores.masked_fill(~source.is_token, torch.finfo(scores.dtype).min)
        context = scores.softmax(dim=-1) @ source.states.float()
        return self.dropout(torch.tanh(self.output(torch.cat([context, x], dim=2)))), last


@register(RecurrentSeq2SeqConfig)
class RecurrentSeq2Seq(Model):
    """Encoder and decoder. Rows come in pairs, as in `model.kinds.seq2seq`."""

    config: RecurrentSeq2SeqConfig
    head: OutputBias
    kernel_flops: ClassVar[Mapping[Any, Callable[..., int]]] = bilstm.KERNEL_FLOPS

    def __init__(self, config: RecurrentSeq2SeqConfig) -> None:
        super().__init__()
        self.config, self.pooler = config, None
        self.embeddings = WordVectors(config)
        self.encoder = RecurrentEncoder(config)
        self.decoder = RecurrentDecoder(config)
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
        layers, past = self._read(input_ids[0::2], mask)
        # The last token of a target predicts nothing, and nothing predicts the first.
        words = self.embeddings(input_ids[1::2, :-1])
        written, _ = self.decoder(words, self.decoder.source(layers[-1], mask), past)
        target = F.pad(written.to(layers[-1].dtype), (0, 0, 1, 0))
        states = torch.stack([layers[-1], target], dim=1).flatten(0, 1)
        captured = {number: layers[number] for number in capture.hidden_states}
        return Encoded(states, captured, {}).at(rows)

    def decoding(self, source_ids: Tensor, lengths: Tensor | None) -> RecurrentDecoding:
        layers, past = self._read(source_ids, lengths)
        return RecurrentDecoding(self, self.decoder.source(layers[-1], lengths), past)

    def _read(
        self, ids: Tensor, attention_mask: Tensor | None
    ) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """The encoder's states after each layer, and with which the decoder's layers begin."""
        tokens = bilstm.token_counts(ids, attention_mask)
        x = self.embeddings(ids)
        layers = self.encoder(x, bilstm.reversal(tokens, x))
        past = []
        for states in layers[1:]:
            last = bilstm.ends(states, torch.zeros_like(tokens), tokens - 1)[None].contiguous()
            past.append((last, torch.zeros_like(last)))
        return layers, past

    def projection_parts(self) -> ProjectionParts:
        return ProjectionParts(self.embeddings.word.weight, self.head.bias)

    def fill(
        self, module: nn.Module, key: str, name: str, parameter: Tensor, generator: torch.Generator
    ) -> None:
        """Uniform weights and biases, as OpenNMT's recurrent models begin."""
        bound = self.config.initializer_range
        parameter.uniform_(-bound, bound, generator=generator)
        zero_padding(module, parameter)

    def flops_per_token(self, length: int, masked_fraction: float) -> float:
        """The gates of both LSTMs and the attention, of source and target of `length` each."""
        hidden = self.config.hidden_size
        half = hidden // 2
        encoder = 2 * 2 * 4 * half * (hidden + half)
        decoder = 2 * 4 * hidden * 2 * hidden
        attention = 2 * hidden * hidden + 4 * length * hidden + 4 * hidden * hidden
        layers = self.config.layers * (encoder + decoder) + attention
        return layers / 2 + masked_fraction * 2 * hidden * self.config.vocab_size


class RecurrentDecoding:
    """The decoding of sources (`model.generation.Decoding`), with each layer's last states."""

    def __init__(
        self, model: RecurrentSeq2Seq, source: _Source, past: list[tuple[Tensor, Tensor]]
    ) -> None:
        self._model, self._source, self._past = model, source, past

    def log_probabilities(self, tokens: Tensor) -> Tensor:
        words = self._model.embeddings(tokens[:, None])
        states, self._past = self._model.decoder(words, self._source, self._past)
        logits = vocabulary_logits(states[:, 0], *self._model.output_projection())
        return logits.float().log_softmax(dim=-1)

    def repeat(self, count: int) -> None:
        rows = torch.arange(len(self._source.states), device=self._source.states.device)
        rows = rows.repeat_interleave(count)
        self._source = self._source.select(rows)
        self.select(rows)

    def select(self, rows: Tensor) -> None:
        self._past = [
            (state.index_select(1, rows), cell.index_select(1, rows)) for state, cell in self._past
        ]
