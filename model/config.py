"""The one dataclass that describes every encoder of the family."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from configs.rules import FRACTION, PROBABILITY, OneOf, Range, Unit, positive
from configs.section import Refusal
from model.model_config import REPEATS, WIDTH, Ability, ModelConfig, PaddingToken, VocabularySize
from model.task_head_config import WIDEST

if TYPE_CHECKING:
    from typing import Self  # of Python 3.11 on

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")
_WIDTH_OR_NONE = Range(0, WIDEST)
DROPOUT_PLACES = ("embedding", "attention", "attention_output", "feed_forward", "head")


@dataclass
class EncoderConfig(ModelConfig):
    """Sizes and parts of an encoder with its heads; the defaults are BERT-base."""

    abilities: ClassVar[frozenset[Ability]] = frozenset(Ability) - {Ability.GENERATE}
    embedding_keys: ClassVar[tuple[str, ...]] = (
        "vocab_size", "hidden_size", "embedding_size", "embedding_projection", "trigram",
        "positions", "max_positions", "segment_types", "norm_bias", "head_bias",
        "decoder_bias",
    )  # fmt: skip
    head_keys: ClassVar[tuple[str, ...]] = (*ModelConfig.head_keys, "pooler")
    training_keys: ClassVar[tuple[str, ...]] = (
        *ModelConfig.training_keys, "attention_dropout", "dropout_at", "initializer"
    )  # fmt: skip

    kind: Annotated[str, OneOf("encoder"), "The kind of model."] = field(
        default="encoder", kw_only=True
    )

    # Sizes
    vocab_size: VocabularySize = 30522
    hidden_size: Annotated[int, WIDTH, "Width of the hidden states."] = 768
    layers: Annotated[int, REPEATS, "Number of layers."] = 12
    heads: Annotated[int, WIDTH, "Attention heads in a layer."] = 12
    ffn_size: Annotated[int, WIDTH, "Width inside a feed-forward network."] = 3072
    kv_heads: Annotated[
        int,
        _WIDTH_OR_NONE,
        "Heads of keys and values, each read by an equal group of the `heads` (GQA, arXiv "
        "2305.13245); 0: as many as `heads`.",
    ] = 0
    embedding_size: Annotated[
        int, _WIDTH_OR_NONE, "Width of the word vectors; 0: the hidden size."
    ] = 0
    max_positions: Annotated[
        int, WIDTH, Unit("tokens"), "Rows of the position embedding; the longest sequence."
    ] = 512
    segment_types: Annotated[
        int, _WIDTH_OR_NONE, "Rows of the segment embedding; 0: no segment embedding."
    ] = 2
    pad_token_id: PaddingToken = 0

    # Embedding
    positions: Annotated[
        str,
        OneOf("learned", "learned_after_padding", "rotary", "relative"),
        "learned_after_padding: RoBERTa's, which count tokens from `pad_token_id` + 1. relative: "
        "each layer scores distances apart from content (DeBERTa, arXiv 2006.03654).",
    ] = "learned"
    position_buckets: Annotated[
        int,
        _WIDTH_OR_NONE,
        "Relative positions: how many vectors the distances in one direction have (DeBERTaV3: "
        "256). Distances beyond half of it share vectors by their logarithm. 0: each distance has "
        "its own.",
    ] = 0
    embedding_projection: Annotated[
        str,
        OneOf("none", "word", "sum"),
        "Where word vectors are projected to the hidden size. word: before they are added to "
        "the other embeddings (MobileBERT); sum: afterwards (ALBERT).",
    ] = "none"
    trigram: Annotated[
        bool, "Concatenate the next, current and previous word vector (MobileBERT)."
    ] = False
    embedding_norm: Annotated[bool, "Normalise the embedding output."] = True

    # Layers
    norm: Annotated[
        str,
        OneOf("layer_norm", "rms_norm", "no_norm"),
        "The kind of norm of embeddings and layers; rms_norm: g * x / rms(x) (arXiv "
        "1910.07467); no_norm: g * x + b (MobileBERT). Heads have layer norms.",
    ] = "layer_norm"
    norm_eps: Annotated[float, positive(1.0), "Added to the variance in a layer norm."] = 1e-12
    fixed_norm_eps: Annotated[
        float,
        FRACTION,
        "The epsilon of the embedding norm and the last feed-forward norm; 0: `norm_eps`.",
    ] = 0.0
    norm_bias: Annotated[bool, "Layer norms have a bias."] = True
    qk_norm: Annotated[
        bool,
        "Each head's queries and keys pass an RMS norm before rotary positions, so that scores "
        "stay bounded (arXiv 2302.05442; Qwen3).",
    ] = False
    norm_placement: Annotated[
        str,
        OneOf("post", "pre"),
        "post: norms after each residual sum; pre: norms before each part.",
    ] = "post"
    activation: Annotated[str, OneOf(*ACTIVATIONS), "Activation of the feed-forward networks."] = (
        "gelu"
    )
    feed_forward: Annotated[
        str, OneOf("mlp", "glu"), "The feed-forward network; glu: gated linear unit (ModernBERT)."
    ] = "mlp"
    feed_forwards: Annotated[
        int, REPEATS, "Feed-forward networks stacked in a layer (MobileBERT: 4)."
    ] = 1
    attention_bias: Annotated[bool, "The attention's projections have biases."] = True
    ffn_bias: Annotated[bool, "The feed-forward networks have biases."] = True
    bottleneck_size: Annotated[
        int, _WIDTH_OR_NONE, "Width inside a layer; 0: the hidden size (MobileBERT: a smaller one)."
    ] = 0
    bottleneck_attention: Annotated[
        str,
        OneOf("hidden", "shared", "inner"),
        "The input of Q and K: the hidden states, a bottleneck that they share, or the "
        "layer's inner states, which V then reads too.",
    ] = "hidden"
    local_window: Annotated[
        int,
        Range(0, 2**31),
        Unit("tokens"),
        "The window of a local attention layer, both sides together; 0: no limit.",
    ] = 0
    global_every: Annotated[
        int, REPEATS, Unit("layers"), "The first of every group of this many layers is global."
    ] = 1
    global_rope_theta: Annotated[
        float, positive(1e12), "Base of the rotary positions in global layers."
    ] = 160000.0
    local_rope_theta: Annotated[
        float, positive(1e12), "Base of the rotary positions in local layers."
    ] = 10000.0

    # Sharing
    sharing: Annotated[
        str,
        OneOf("none", "all", "attention", "ffn"),
        "The weights that the layers of a group share (ALBERT).",
    ] = "none"
    groups: Annotated[
        int, REPEATS, "Groups of sharing layers; layer i is in floor(i * groups / layers)."
    ] = 1

    # Heads
    pooler: Annotated[
        str,
        OneOf("none", "first", "tanh"),
        "The pooled state; first: the first token's state; tanh: after a dense layer and tanh.",
    ] = "tanh"
    head_activation: Annotated[
        str, OneOf("", *ACTIVATIONS), "Activation of the masked-LM transform; empty: `activation`."
    ] = ""
    head_transform: Annotated[
        bool,
        "The masked-LM head has a dense layer, an activation and a norm; false: it has none "
        "of these.",
    ] = True
    head_bias: Annotated[bool, "The masked-LM transform has a bias."] = True
    tied_decoder: Annotated[
        bool, "The vocabulary projection is the word embedding; false: a matrix of its own."
    ] = True
    decoder_bias: Annotated[bool, "The vocabulary projection has a bias."] = True

    # Training
    dropout: Annotated[float, PROBABILITY, "Dropout probability, except for attention weights."] = (
        0.1
    )
    attention_dropout: Annotated[
        float, PROBABILITY, "Dropout probability of attention weights."
    ] = 0.1
    dropout_at: Annotated[
        list[str], OneOf(*DROPOUT_PLACES), "The parts whose outputs get dropout."
    ] = field(default_factory=lambda: [*DROPOUT_PLACES])
    initializer: Annotated[
        str,
        OneOf("truncated_normal", "normal", "scaled_truncated_normal"),
        "Distribution of random weights. Truncated: at two standard deviations; scaled: output "
        "weights of each residual branch are multiplied by 1 / sqrt(2 * layers).",
    ] = "truncated_normal"
    initializer_range: Annotated[
        float, positive(100.0), "Standard deviation of random weights."
    ] = 0.02

    def conflicts(self) -> Iterator[Refusal]:
        if self.inner_size % self.heads:
            yield "heads", f"{self.heads} does not divide the width {self.inner_size}"
        if self.kv_heads and self.heads % self.kv_heads:
            yield "kv_heads", f"{self.kv_heads} does not divide the {self.heads} heads"
        if not self.head_transform and self.embedding_projection != "none":
            yield "head_transform", "must be true where word vectors have another width"
        if not self.tied_decoder and self.embedding_projection == "word":
            yield "tied_decoder", "must be true with embedding_projection: word"
        if self.positions == "relative":
            if self.kv_heads or self.qk_norm or self.bottleneck_size:
                yield "positions", "relative ones need kv_heads 0, qk_norm false, bottleneck_size 0"
            least = self.position_buckets // 2 + 2
            if self.max_positions < least:
                yield "position_buckets", f"needs max_positions of at least {least}"
        elif self.position_buckets:
            yield "position_buckets", "is for positions: relative"
        if self.positions == "rotary" and self.head_size % 2:
            yield "heads", f"rotary positions need an even head size, not {self.head_size}"
        if self.embedding_projection == "none" and self.word_size != self.hidden_size:
            yield "embedding_projection", "must be word or sum if embedding_size is set"
        if self.embedding_projection == "word" and self.word_size > self.hidden_size:
            yield "embedding_size", "must not exceed hidden_size with embedding_projection: word"
        if self.trigram and self.embedding_projection != "word":
            yield "trigram", "needs embedding_projection: word"
        if self.groups > self.layers:
            yield "groups", f"{self.groups} is more than the {self.layers} layers"
        if self.groups > 1 and self.sharing == "none":
            yield "groups", "needs sharing other than none"
        if self.bottleneck_size and self.norm_placement == "pre":
            yield "bottleneck_size", "is for norm_placement: post"
        if self.pair_head and self.pooler == "none":
            yield "pair_head", "needs a pooler"
        yield from super().conflicts()
        if self.positions == "learned_after_padding" and self.first_position >= self.max_positions:
            yield "max_positions", "must exceed pad_token_id + 1"

    @property
    def word_size(self) -> int:
        """Width of the word vectors, and of the vocabulary projection's tied weight."""
        return self.embedding_size or self.hidden_size

    @property
    def inner_size(self) -> int:
        """Width inside a layer."""
        return self.bottleneck_size or self.hidden_size

    @property
    def attention_width(self) -> int:
        """The numbers of a token's query, key or value; 0 where they alone make no scores."""
        return 0 if self.positions == "relative" else self.inner_size

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.inner_size // self.heads

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values in a layer."""
        return self.kv_heads or self.heads

    @property
    def first_position(self) -> int:
        """Row of the position table that the first token reads."""
        return self.pad_token_id + 1 if self.positions == "learned_after_padding" else 0

    @property
    def longest_sequence(self) -> int:
        """The longest sequence that the positions allow, in tokens."""
        return self.max_positions - self.first_position

    @property
    def vocabulary_input_size(self) -> int:
        """Width of the vocabulary projection's input (MobileBERT reaches it by untied columns)."""
        return self.word_size if self.embedding_projection != "word" else self.hidden_size

    @property
    def reads_segments(self) -> bool:
        """Whether there are several segment embeddings."""
        return self.segment_types > 1

    @property
    def description(self) -> str:
        """The sizes in words."""
        return (
            f"{self.layers} layers, hidden size {self.hidden_size}, {self.heads} attention heads, "
            f"{self.vocab_size:,} tokens in the vocabulary, up to {self.longest_sequence} positions"
        )

    def cannot(self, ability: Ability) -> str:
        """Which of the model's keys prevents an ability; empty if none does."""
        if ability == Ability.POOL and self.pooler == "none":
            return "is read from a pooled state; set model.pooler to tanh or first"
        if ability == Ability.FREEZE_POSITIONS and not self.has_position_table:
            return f"{self.positions} positions have no embeddings; remove it"
        if ability == Ability.LAYER_BY_LAYER and self.sharing != "none":
            return "needs layers that share nothing; set model.sharing"
        if ability == Ability.CAUSAL and self.trigram:
            return "reads the next word's vector at each token; set model.trigram to false"
        if ability == Ability.GROW and self.groups > 1:
            return "is for models without groups of shared layers"
        return super().cannot(ability)

    @property
    def lacks_first_norm(self) -> bool:
        """Whether the embedding norm replaces that before the first attention (ModernBERT).

        It does not where a projection comes between them, or where other layers, which need a
        norm, share the weights of this attention.
        """
        normed = self.embedding_norm and self.embedding_projection != "sum"
        return self.norm_placement == "pre" and normed and self.sharing not in ("all", "attention")

    def cannot_copy(self, layers: Sequence[int]) -> str:
        """A reason, unless every layer gets a place in which it has the same weights."""
        if self.groups > 1:
            return "is for models without groups of shared layers"
        firsts = [place for place, layer in enumerate(layers) if layer == 0]
        if self.lacks_first_norm and firsts != [0]:
            return (
                f"must begin with layer 0 and have it once, not {[*layers]}: it alone has no norm "
                "before its attention"
            )
        return ""

    def with_dropout(self, rate: float) -> Self:
        """This configuration with a dropout of `rate`, also for attention weights."""
        return dataclasses.replace(self, dropout=rate, attention_dropout=rate)

    def without_attention_dropout(self) -> Self:
        """This configuration without dropout of attention weights."""
        return dataclasses.replace(self, attention_dropout=0.0)

    def layer_units(self, part: str) -> list[int]:
        """The weights that each layer uses (ALBERT); `part` is attention or feed_forward."""
        if self.sharing not in ("all", {"feed_forward": "ffn"}.get(part, part)):
            return list(range(self.layers))
        return [i * self.groups // self.layers for i in range(self.layers)]

    @property
    def has_position_table(self) -> bool:
        """Whether position vectors are added to the word vectors."""
        return self.positions in ("learned", "learned_after_padding")

    @property
    def distances(self) -> int:
        """The rows of the table of relative positions, of both directions."""
        return 2 * (self.position_buckets or self.max_positions)

    @property
    def is_rotary(self) -> bool:
        return self.positions == "rotary"

    def with_rope_theta(self, base: float | None) -> Self:
        if base is None or not self.is_rotary:
            return self
        return dataclasses.replace(self, global_rope_theta=base)

    @property
    def free_keys(self) -> tuple[str, ...]:
        rotary = "max_positions", "global_rope_theta", "local_rope_theta"
        return rotary if self.is_rotary else ()

    def own_keys(self) -> tuple[str, ...]:
        """Besides the heads': details beside the weights, and tables that it does not have."""
        details = "global_every", "local_window", "norm_eps", "fixed_norm_eps", "pad_token_id"
        return (*super().own_keys(), *details, *([] if self.segment_types else ["segment_types"]))

    def has_same_norm(self, other: ModelConfig) -> bool:
        """Whether the embedding norms have the same weights."""
        return isinstance(other, EncoderConfig) and self.norm == other.norm

    def meaning(self) -> dict[str, object]:
        local = tuple(layer for layer in range(self.layers) if self.is_local(layer))
        implied = {
            "embedding_size": self.word_size,
            "head_activation": self.head_activation or self.activation,
            "kv_heads": self.key_value_heads,
            "fixed_norm_eps": self.fixed_norm_eps or self.norm_eps,
            "global_every": local,
        }
        silent = []
        if not local:
            silent += ["local_window", "local_rope_theta"]
        if self.positions != "rotary":
            silent += ["local_rope_theta", "global_rope_theta"]
        if not self.bottleneck_size:
            silent.append("bottleneck_attention")
        if self.sharing == "none":
            silent.append("groups")
        if not self.head_transform:
            silent += ["head_activation", "head_bias"]
            silent += ["norm_bias"] if self.norm == "rms_norm" else []
        everything = super().meaning() | implied
        return {key: value for key, value in everything.items() if key not in silent}

    def dropout_rate(self, place: str) -> float:
        """Probability at one of `DROPOUT_PLACES`; 0 where the architecture has no dropout.

        ``attention`` is for the attention weights, the others are for the outputs of these parts.
        """
        if place not in self.dropout_at:
            return 0.0
        return self.attention_dropout if place == "attention" else self.dropout

    def is_local(self, layer: int) -> bool:
        """Whether the layer with this number, from 0, attends to a window only."""
        return self.local_window > 0 and layer % self.global_every != 0

    def window(self, number: int) -> int:
        """Tokens that layer `number`, from 1, attends to, both sides together; 0: all."""
        return self.local_window if self.is_local(number - 1) else 0
