"""A bidirectional LSTM, the student of Tang et al. (arXiv 1903.12136), also of pairs (siamese)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from configs.progress import counted
from configs.rules import PROBABILITY, OneOf, positive
from configs.section import Refusal
from model.accounting import head_flops
from model.errors import ModelError
from model.heads import ConditionalRandomField, MaskedLanguageModelHead, ProjectionParts
from model.initialisation import zero_padding
from model.model_config import REPEATS, WIDTH, Ability, ModelConfig, PaddingToken, VocabularySize
from model.parts import Table
from model.precision import Dense
from model.protocol import NOTHING, Capture, Encoded, Model, register


class SegmentPairs(NamedTuple):
    """Where the segments of B pairs [CLS] a [SEP] b [SEP] lie. Neither of them has the [CLS].

    As texts of their own they are 2 B rows: all first segments, then all second ones.
    """

    split: Tensor  # int64 [B], the place of the second segment's first token
    tokens: Tensor  # int64 [B], the number of tokens, padding not counted

    @classmethod
    def of(cls, segment_ids: Tensor, tokens: Tensor) -> SegmentPairs:
        """The segments by their ids [B, L], 0 and 1, of which `tokens` [B] are no padding."""
        places = torch.arange(segment_ids.shape[1], device=segment_ids.device)
        is_first = (segment_ids == 0) & (places < tokens[:, None])
        return cls(is_first.sum(dim=1), tokens)

    @property
    def sizes(self) -> Tensor:
        """The tokens of each text, int64 [2 B]."""
        return torch.cat([self.split - 1, self.tokens - self.split])

    def apart(self, x: Tensor) -> Tensor:
        """Pairs [B, L, H] as texts [2 B, L, H]; what follows a text is padding."""
        length = x.shape[1]
        begins = torch.cat([torch.ones_like(self.split), self.split])[:, None]
        places = (begins + torch.arange(length, device=x.device)).clamp(max=length - 1)
        return x.repeat(2, 1, 1).gather(1, places[..., None].expand(-1, -1, x.shape[2]))

    def joined(self, states: Tensor) -> Tensor:
        """Texts [2 B, L, H] as pairs [B, L, H], with the states of padding at [CLS] and padding."""
        rows, length = len(self.split), states.shape[1]
        places = torch.arange(length, device=states.device).expand(rows, -1)
        is_second = places >= self.split[:, None]
        within = torch.where(is_second, places - self.split[:, None], places - 1) % length
        text = torch.arange(rows, device=states.device)[:, None] + rows * is_second
        flat = (text * length + within).flatten()
        return states.flatten(0, 1).index_select(0, flat).unflatten(0, (rows, length))


WORD_RANGE = 0.25  # of word vectors, in the original


@dataclass
class BiLSTMConfig(ModelConfig):
    """A bidirectional LSTM: one layer, and a hidden layer before the labels (Tang et al., 2019).

    The pooled state is a dense layer with ReLU on the concatenated last states of both directions.
    A masked-LM head, tied to the word vectors, predicts tokens. Sequences may have any length. With
    `siamese` it encodes the texts of a pair separately. Initial weights are those of the original's
    code (castorini/d-bert).
    """

    abilities: ClassVar[frozenset[Ability]] = frozenset(
        {Ability.POOL, Ability.TASK_HEAD, Ability.GROW}
    )
    embedding_keys: ClassVar[tuple[str, ...]] = ("vocab_size", "hidden_size")

    kind: Annotated[str, OneOf("bilstm"), "The kind of model."] = field(
        default="bilstm", kw_only=True
    )
    vocab_size: VocabularySize = 30522
    hidden_size: Annotated[
        int, WIDTH, "Width of the word vectors, and of the two directions' states together."
    ] = 300
    layers: Annotated[int, REPEATS, "Number of layers."] = 1
    pooled_size: Annotated[
        int, WIDTH, "Width of the hidden layer between the last states and the labels."
    ] = 200
    siamese: Annotated[
        bool,
        "The two texts of a pair are read separately, by the same weights. If h1 and h2 "
        "are their last states, the hidden layer reads [h1, h2, h1 * h2, |h1 - h2|].",
    ] = False
    pad_token_id: PaddingToken = 0
    dropout: Annotated[
        float, PROBABILITY, "Dropout probability of the input of the heads of tasks."
    ] = 0.1
    initializer_range: Annotated[
        float,
        positive(100.0),
        "Standard deviation of the masked-LM head's weights, and of the word vectors with it.",
    ] = 0.02

    def conflicts(self) -> Iterator[Refusal]:
        if self.hidden_size % 2:
            yield "hidden_size", f"{self.hidden_size} must be even: each direction has half of it"
        yield from super().conflicts()

    def dropout_rate(self, place: str) -> float:
        """The one dropout probability, which applies to every part."""
        return self.dropout

    @property
    def reads_segments(self) -> bool:
        """Whether the segment ids tell two texts apart."""
        return self.siamese

    @property
    def needs_pairs(self) -> bool:
        """Whether it compares two texts."""
        return self.siamese

    @property
    def description(self) -> str:
        """The sizes in words."""
        form = "a siamese" if self.siamese else "a"
        return (
            f"{form} bidirectional LSTM of {counted(self.layers, 'layer')}, "
            f"hidden size {self.hidden_size}, {self.vocab_size:,} tokens in the vocabulary"
        )


class WordVectors(nn.Module):
    """Word vectors: int64 [B, L] to [B, L, H]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        pad = config.pad_token_id if config.pad_token_id >= 0 else None
        self.word = Table(config.vocab_size, config.hidden_size, padding_idx=pad)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.word(input_ids)


class BothDirections(nn.Module):
    """One layer: an LSTM that reads each row forwards and one that reads it backwards.

    Both compute in the dtype of their weights, without autocast: on GPUs that to bfloat16 would
    compute them in float16, where gradients underflow without a loss scale.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        half = config.hidden_size // 2
        self.forwards = nn.LSTM(config.hidden_size, half, batch_first=True)
        self.backwards = nn.LSTM(config.hidden_size, half, batch_first=True)

    def forward(self, x: Tensor, reverse: Tensor) -> Tensor:
        """Map x [B, L, H] to states [B, L, H]; `reverse` int64 [B, L] reverses a row's tokens."""
        index = reverse[..., None]
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(next(self.parameters()).dtype)
            ahead, _ = self.forwards(x)
            back, _ = self.backwards(x.gather(1, index.expand_as(x)))
        return torch.cat([ahead, back.gather(1, index.expand_as(back))], dim=2)


class Layers(nn.Module):
    """The layers, whose parameters are named as in `model.protocol`."""

    def __init__(self, config: BiLSTMConfig) -> None:
        super().__init__()
        self.lstm = nn.ModuleList(BothDirections(config) for _ in range(config.layers))

    def forward(self, x: Tensor, reverse: Tensor, capture: Capture) -> Encoded:
        states = [x]
        for layer in self.lstm:
            states.append(layer(states[-1], reverse))
        return Encoded(states[-1], {i: states[i] for i in capture.hidden_states}, {})


class LastStates(nn.Module):
    """A dense layer with ReLU on the last states of both directions, of a text or of a pair's."""

    def __init__(self, config: BiLSTMConfig) -> None:
        super().__init__()
        read = 4 * config.hidden_size if config.siamese else config.hidden_size
        self.dense = Dense(read, config.pooled_size)

    def forward(self, states: Tensor, tokens: Tensor, pairs: SegmentPairs | None) -> Tensor:
        """Map states [B, L, H] to [B, pooled_size]; `tokens` int64 [B] are those of each row."""
        if pairs is None:
            return torch.relu(self.dense(ends(states, torch.zeros_like(tokens), tokens - 1)))
        first = ends(states, torch.ones_like(tokens), pairs.split - 1)
        second = ends(states, pairs.split, tokens - 1)
        compared = [first, second, first * second, (first - second).abs()]
        return torch.relu(self.dense(torch.cat(compared, dim=1)))


def ends(states: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Both directions' last states [B, H] of texts in [B, L, H] from `first` [B] to `last` [B]."""
    rows, half = torch.arange(len(states), device=states.device), states.shape[2] // 2
    return torch.cat([states[rows, last, :half], states[rows, first, half:]], dim=1)


def lstm_flops(
    x: Sequence[int], inputs: Sequence[int], states: Sequence[int], *_: Any, **__: Any
) -> int:
    """FLOPs of one layer and direction on x [L, B, E], from the shapes of its two weights."""
    return 2 * math.prod(x[:2]) * (math.prod(inputs) + math.prod(states))


def lstm_backward_flops(*operands: Any, **keywords: Any) -> int:
    """FLOPs of the backward pass of such a layer."""
    return 2 * lstm_flops(*operands, **keywords)


KERNEL_FLOPS: Mapping[Any, Callable[..., int]] = {
    torch.ops.aten.mkldnn_rnn_layer: lstm_flops,
    torch.ops.aten.mkldnn_rnn_layer_backward: lstm_backward_flops,
}


@register(BiLSTMConfig)
class BiLSTM(Model):
    """The bidirectional LSTM with its heads."""

    config: BiLSTMConfig
    pooler: LastStates
    head: MaskedLanguageModelHead | None
    kernel_flops: ClassVar[Mapping[Any, Callable[..., int]]] = KERNEL_FLOPS

    def __init__(self, config: BiLSTMConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = WordVectors(config)
        self.encoder = Layers(config)
        self.pooler = LastStates(config)
        self.add_heads()

    def encode(
        self,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        capture: Capture = NOTHING,
        rows: Tensor | None = None,
    ) -> Encoded:
        """The states [B, L, H]. Padding must follow the tokens; its states are meaningless.

        So are those of a siamese model at [CLS]. It raises ModelError without segment ids.
        """
        tokens = token_counts(input_ids, attention_mask)
        pairs = self._pairs(segment_ids, tokens)
        x = self.embeddings(input_ids)
        if pairs is None:
            encoded = self.encoder(x, reversal(tokens, x), capture)
        else:
            encoded = self.encoder(pairs.apart(x), reversal(pairs.sizes, x), capture)
            states = {
                number: pairs.joined(state) for number, state in encoded.hidden_states.items()
            }
            encoded = Encoded(pairs.joined(encoded.last_hidden_state), states, {})
        return encoded.at(rows)

    def rows_read(
        self, input_ids: Tensor, masked_positions: Tensor | None, capture: Capture
    ) -> Tensor | None:
        return None if capture.heads else super().rows_read(input_ids, masked_positions, capture)

    def pool(
        self,
        first: Tensor | None,
        last: Tensor | None,
        segment_ids: Tensor | None,
        attention_mask: Tensor | None,
    ) -> Tensor | None:
        if last is None:
            return None
        tokens = token_counts(last[..., 0], attention_mask)
        return self.pooler(last, tokens, self._pairs(segment_ids, tokens))

    def projection_parts(self) -> ProjectionParts:
        assert self.head is not None, "a model without a masked-LM head"
        return ProjectionParts(self.embeddings.word.weight, self.head.bias)

    def fill(
        self, module: nn.Module, key: str, name: str, parameter: Tensor, generator: torch.Generator
    ) -> None:
        """Uniform weights, as in the original; a masked-LM head's are normal, its biases zero.

        Word vectors are uniform in +-0.25, or normal where a masked-LM head is tied to them. An
        LSTM's weights are uniform in +-1 / sqrt(its state size), those of dense layers and their
        biases in +-1 / sqrt(their input size).
        """
        if isinstance(module, nn.LSTM):
            bound = 1.0 / math.sqrt(module.hidden_size)
        elif isinstance(module, nn.Embedding):
            bound = 0.0 if self.config.mlm_head else WORD_RANGE
        elif isinstance(module, nn.Linear) and not name.startswith("head."):
            bound = 1.0 / math.sqrt(module.in_features)
        else:
            bound = 0.0
        if bound:
            parameter.uniform_(-bound, bound, generator=generator)
        elif key == "bias" or isinstance(module, ConditionalRandomField):
            parameter.zero_()
        elif parameter.ndim == 1:  # of a norm
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, self.config.initializer_range, generator=generator)
        zero_padding(module, parameter)

    def flops_per_token(self, length: int, masked_fraction: float) -> float:
        """The four gates of each direction, from inputs and states, plus the heads."""
        config, hidden = self.config, self.config.hidden_size
        half = hidden // 2
        layer = 2 * 2 * 4 * half * (hidden + half) * (1 + config.siamese)
        head = (2 * hidden * hidden + 2 * hidden * config.vocab_size) * config.mlm_head
        read = 4 * hidden if config.siamese else hidden
        pooled = 2 * config.pooled_size * read + head_flops(config, length)
        return config.layers * layer + masked_fraction * head + pooled / length

    def _pairs(self, segment_ids: Tensor | None, tokens: Tensor) -> SegmentPairs | None:
        """The texts of each pair, where they are read apart."""
        if not self.config.siamese:
            return None
        if segment_ids is None:
            raise ModelError("segment_ids: a siamese model needs them, 0 and 1 in a pair's texts")
        return SegmentPairs.of(segment_ids, tokens)


def reversal(tokens: Tensor, x: Tensor) -> Tensor:
    """Places int64 [T, L] that reverse the first `tokens` [T] of the L places of x, in each row."""
    places, sizes = torch.arange(x.shape[1], device=x.device), tokens[:, None]
    return torch.where(places < sizes, sizes - 1 - places, places)


def token_counts(of: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The number of tokens in each row of `of` [B, L], int64 [B]; the mask as in `Model.encode`."""
    if attention_mask is None:
        return of.new_full((len(of),), of.shape[1], dtype=torch.int64)
    return attention_mask if attention_mask.ndim == 1 else attention_mask.ne(0).sum(dim=1)
