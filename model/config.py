"""The one dataclass that describes every encoder of the family."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

_CHOICES = {
    "positions": ("learned", "learned_after_padding", "rotary"),
    "embedding_projection": ("none", "word", "sum"),
    "norm": ("layer_norm", "no_norm"),
    "norm_placement": ("post", "pre"),
    "activation": ("gelu", "gelu_tanh", "relu", "silu"),
    "head_activation": ("", "gelu", "gelu_tanh", "relu", "silu"),
    "feed_forward": ("mlp", "glu"),
    "bottleneck_attention": ("hidden", "shared", "inner"),
    "sharing": ("none", "all", "attention", "ffn"),
    "pooler": ("none", "first", "tanh"),
    "initializer": ("truncated_normal", "normal", "scaled_truncated_normal"),
}
# The least and the most; beyond these no machine holds the model, or a name for its sizes.
_MOST = 2**24
_SIZES = {
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "heads", "ffn_size", "max_positions"), (1, _MOST)
    ),
    **dict.fromkeys(("embedding_size", "bottleneck_size", "segment_types"), (0, _MOST)),
    **dict.fromkeys(("layers", "groups", "feed_forwards", "global_every"), (1, 4096)),
    "local_window": (0, 2**31),
}
# Above 0, and at most.
_POSITIVE = {
    "norm_eps": 1.0,
    "global_rope_theta": 1e12,
    "local_rope_theta": 1e12,
    "initializer_range": 100.0,
}
DROPOUT_PLACES = ("embedding", "attention", "attention_output", "feed_forward")


class ModelError(ValueError):
    """Something about a model or its files that the user can fix; the message is one line."""


@dataclass
class EncoderConfig:
    """Sizes and parts of an encoder with its heads; the defaults are BERT-base.

    Raises ValueError, beginning with the key, for values that do not fit together.
    """

    # Sizes
    vocab_size: int = 30522
    hidden_size: int = 768
    layers: int = 12
    heads: int = 12
    ffn_size: int = 3072
    embedding_size: int = 0  # width of the word vectors; 0: the hidden size
    max_positions: int = 512
    segment_types: int = 2  # 0: no segment embedding
    pad_token_id: int = 0  # its word vector gets no gradient from the input side; -1: none

    # Embedding
    positions: str = "learned"  # learned_after_padding: RoBERTa's, counting tokens from pad + 1
    embedding_projection: str = "none"  # word: before the sum (MobileBERT); sum: after it (ALBERT)
    trigram: bool = False  # next, current and previous word vector side by side (MobileBERT)
    embedding_norm: bool = True

    # Layers
    norm: str = "layer_norm"  # no_norm: g * x + b (MobileBERT)
    norm_eps: float = 1e-12
    fixed_norm_eps: float = (
        0.0  # of the embedding and last feed-forward norm, if it differs; 0: norm_eps
    )
    norm_bias: bool = True
    norm_placement: str = "post"
    activation: str = "gelu"
    feed_forward: str = "mlp"
    feed_forwards: int = 1  # feed-forward networks stacked in a layer (MobileBERT: 4)
    attention_bias: bool = True
    ffn_bias: bool = True
    bottleneck_size: int = 0  # width inside a layer where it differs from the hidden size; 0: none
    bottleneck_attention: str = "hidden"  # what Q and K read: hidden states, own bottleneck, inner
    local_window: int = 0  # tokens seen by a local attention layer, both sides together; 0: all
    global_every: int = 1  # of so many layers the first attends globally
    global_rope_theta: float = 160000.0
    local_rope_theta: float = 10000.0

    # Sharing: layer i uses group floor(i * groups / layers) of what is shared
    sharing: str = "none"
    groups: int = 1

    # Heads
    pooler: str = "tanh"  # first: the first token's state as it is
    pair_head: bool = False  # two logits on the pooled state: next sentence or sentence order
    head_activation: str = ""  # of the masked-LM transform; empty: the layers' activation
    head_bias: bool = True
    decoder_bias: bool = True

    # Training
    dropout: float = 0.1
    attention_dropout: float = 0.1
    dropout_at: list[str] = field(default_factory=lambda: [*DROPOUT_PLACES])  # outputs that drop
    initializer: str = "truncated_normal"
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for key, allowed in _CHOICES.items():
            if getattr(self, key) not in allowed:
                raise ValueError(
                    f"{key}: {getattr(self, key)!r} is not one of {', '.join(allowed)}"
                )
        for key, (least, most) in _SIZES.items():
            if not least <= getattr(self, key) <= most:
                raise ValueError(f"{key}: must be {least} to {most}, not {getattr(self, key)}")
        for key, limit in _POSITIVE.items():
            if not 0 < getattr(self, key) <= limit:
                words = f"must be positive, and at most {limit:g}"
                raise ValueError(f"{key}: {words}, not {getattr(self, key)}")
        if not 0 <= self.fixed_norm_eps <= 1:
            raise ValueError(f"fixed_norm_eps: must be 0 to 1, not {self.fixed_norm_eps}")
        for key in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, key) < 1.0:
                raise ValueError(f"{key}: must lie in [0, 1), not {getattr(self, key)}")
        for place in self.dropout_at:
            if place not in DROPOUT_PLACES:
                raise ValueError(f"dropout_at: {place!r} is not one of {', '.join(DROPOUT_PLACES)}")
        self._check_fit()

    def _check_fit(self) -> None:
        if self.inner_size % self.heads:
            raise ValueError(f"heads: {self.heads} does not divide the width {self.inner_size}")
        if self.positions == "rotary" and self.head_size % 2:
            raise ValueError(
                f"heads: rotary positions need an even head size, not {self.head_size}"
            )
        if self.embedding_projection == "none" and self.word_size != self.hidden_size:
            raise ValueError(
                "embedding_projection: must be word or sum where embedding_size is set"
            )
        if self.trigram and self.embedding_projection != "word":
            raise ValueError("trigram: needs embedding_projection: word")
        if self.groups > self.layers:
            raise ValueError(f"groups: {self.groups} is more than the {self.layers} layers")
        if self.groups > 1 and self.sharing == "none":
            raise ValueError("groups: needs sharing other than none")
        if self.bottleneck_size and self.norm_placement == "pre":
            raise ValueError("bottleneck_size: is for norm_placement post")
        if self.pair_head and self.pooler == "none":
            raise ValueError("pair_head: needs a pooler")
        if not -1 <= self.pad_token_id < self.vocab_size:
            raise ValueError(f"pad_token_id: {self.pad_token_id} is outside the vocabulary")
        if self.positions == "learned_after_padding" and self.first_position >= self.max_positions:
            raise ValueError("max_positions: must exceed pad_token_id + 1")

    @property
    def word_size(self) -> int:
        """Width of the word vectors, and of the vocabulary projection's tied weight."""
        return self.embedding_size or self.hidden_size

    @property
    def inner_size(self) -> int:
        """Width inside a layer."""
        return self.bottleneck_size or self.hidden_size

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.inner_size // self.heads

    @property
    def first_position(self) -> int:
        """Row of the position table that the first token reads."""
        return self.pad_token_id + 1 if self.positions == "learned_after_padding" else 0

    @property
    def longest_sequence(self) -> int:
        """Tokens that the positions reach."""
        return self.max_positions - self.first_position

    @property
    def vocabulary_input_size(self) -> int:
        """Width of the vocabulary projection's input (MobileBERT reaches it by untied columns)."""
        return self.word_size if self.embedding_projection != "word" else self.hidden_size

    def meaning(self) -> dict[str, object]:
        """The keys, with what they imply: equal for models that compute the same from weights.

        Keys that are for training only, or without effect here, are left out.
        """
        local = tuple(layer for layer in range(self.layers) if self.is_local(layer))
        implied = {
            "embedding_size": self.word_size,
            "head_activation": self.head_activation or self.activation,
            "fixed_norm_eps": self.fixed_norm_eps or self.norm_eps,
            "global_every": local,
        }
        silent = ["dropout", "attention_dropout", "dropout_at", "initializer", "initializer_range"]
        if not local:
            silent += ["local_window", "local_rope_theta"]
        if self.positions != "rotary":
            silent += ["local_rope_theta", "global_rope_theta"]
        if not self.bottleneck_size:
            silent.append("bottleneck_attention")
        if self.sharing == "none":
            silent.append("groups")
        everything = dataclasses.asdict(self) | implied
        return {key: value for key, value in everything.items() if key not in silent}

    def dropout_rate(self, place: str) -> float:
        """Probability at one of `DROPOUT_PLACES`, 0 where the architecture drops nothing.

        ``attention`` are the attention weights, the others what comes out of these parts.
        """
        if place not in self.dropout_at:
            return 0.0
        return self.attention_dropout if place == "attention" else self.dropout

    def is_local(self, layer: int) -> bool:
        """Whether the 0-based layer attends to a window only."""
        return self.local_window > 0 and layer % self.global_every != 0

    def window(self, number: int) -> int:
        """Tokens that layer `number`, from 1, attends to, both sides together; 0: all."""
        return self.local_window if self.is_local(number - 1) else 0
