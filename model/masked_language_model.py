"""The encoder with its heads: what is trained, captured and exported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention import QKV
from model.attention_kernel import attention_scores, visible_keys
from model.config import EncoderConfig
from model.embedding import Embeddings
from model.encoder import Capture, Encoded, Encoder
from model.heads import MaskedLanguageModelHead, Pooler
from model.precision import Dense

NOTHING = Capture()
PAIRS = "pairs"  # the pair head among the heads on the pooled state


@dataclass
class Features:
    """What objectives read. All tensors are in the graph; nothing has been copied for them.

    vocabulary_input: [P, E], the vocabulary projection's input at the masked positions ([B * L, E]
        when none were given), None without a masked-LM head. hidden_states: number -> [B, L, H].
        attention: number -> QKV. last_hidden_state: [B, L, H] and pooled: [B, H], None unless
        captured (or no positions were given). heads: the logits [B, labels] of the heads on the
        pooled state, by name; none where it is None. all_positions: [B * L, E], the projection's
        input at every position, or None.
    """

    vocabulary_input: Tensor | None
    hidden_states: dict[int, Tensor]
    attention: dict[int, QKV]
    last_hidden_state: Tensor | None
    pooled: Tensor | None
    heads: dict[str, Tensor]
    all_positions: Tensor | None = None


@dataclass
class ModelOutput:
    """Result of calling the model; what was not asked for is None.

    logits: [B, L, V], or [P, V] at masked positions; None without a masked-LM head. hidden_states:
    N + 1 of [B, L, H].
    attention_scores: N of [B, A, L, L], scaled, before the softmax, the dtype's lowest value at
    hidden keys. pooled: [B, H]. heads: [B, labels] of each head on the pooled state, by name.
    """

    logits: Tensor | None
    hidden_states: tuple[Tensor, ...] | None = None
    attention_scores: tuple[Tensor, ...] | None = None
    pooled: Tensor | None = None
    heads: dict[str, Tensor] = field(default_factory=dict)


class MaskedLanguageModel(nn.Module):
    """An encoder with a masked-LM head tied to its word embedding, and heads on its pooled state.

    It meets `model.protocol.Model`.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.pooler = None if config.pooler == "none" else Pooler(config)
        self.head = MaskedLanguageModelHead(config) if config.mlm_head else None
        self.pair_head = Dense(config.hidden_size, 2) if config.pair_head else None
        self.classifiers = nn.ModuleDict(
            {
                name: Dense(config.hidden_size, len(labels))
                for name, labels in config.classifiers.items()
            }
        )

    def encode(
        self,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        capture: Capture = NOTHING,
    ) -> Encoded:
        """Embeddings and layers only. Ids int64 [B, L]; the mask [B, L] is nonzero at real tokens.

        Where the padding ends each row, the mask may be int64 [B] instead, the number of real
        tokens: then no attention kernel that can skip padding works on it. Pass no mask when
        nothing is padded: the kernels without one are faster.
        """
        return self.encoder(self.embeddings(input_ids, segment_ids), attention_mask, capture)

    def compile_layers(self, **options: Any) -> None:
        """Run each half of a layer through ``torch.compile`` with these options.

        Compiled as modules in place: names, hooks and checkpointing stay as they are, and layers
        of equal shape share their code.
        """
        for part in (*self.encoder.attention, *self.encoder.feed_forward):
            part.compile(dynamic=False, **options)

    def features(
        self,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        masked_positions: Tensor | None = None,
        capture: Capture = NOTHING,
    ) -> Features:
        """The training path: everything up to, and without, the vocabulary projection.

        `masked_positions` int64 [P] indexes the flattened B * L; the head's transform runs there
        only. Losses project `vocabulary_input` with `output_projection()` in chunks.

        Where the `capture` does not read the last layer's output, that layer, too, computes nothing
        but the masked positions after its attention (5% of BERT-base's work, 12% of a 4-layer
        model's, saved). Rounding differs from the whole layer's.
        """
        x = self.embeddings(input_ids, segment_ids)
        whole = masked_positions is None or capture.reads_last_layer(self.config.layers)
        encoded = self.encoder(x, attention_mask, capture, None if whole else masked_positions)
        states = encoded.last_hidden_state
        last = states if whole else None
        all_positions = None
        if last is not None:
            states = last.flatten(0, 1)
            # A pass of its own: the bits at masked positions are the same with and without it.
            all_positions = self._transform(states) if capture.all_positions else None
            if masked_positions is not None:
                states = states.index_select(0, masked_positions)
        pooled, heads = self._pool(last)
        return Features(
            vocabulary_input=self._transform(states),
            hidden_states=encoded.hidden_states,
            attention=encoded.attention,
            last_hidden_state=last,
            pooled=pooled,
            heads=heads,
            all_positions=all_positions,
        )

    def _transform(self, states: Tensor) -> Tensor | None:
        """The vocabulary projection's input [..., E], where there is a masked-LM head."""
        return None if self.head is None else self.head(states)

    def _pool(self, last: Tensor | None) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The pooled state, and the logits of the heads on it, as far as the model has them."""
        if self.pooler is None or last is None:
            return None, {}
        pooled = self.pooler(last)
        return pooled, {name: head(pooled) for name, head in self.pooled_heads().items()}

    def pooled_heads(self) -> dict[str, nn.Module]:
        """The heads on the pooled state, by name."""
        pairs = {} if self.pair_head is None else {PAIRS: self.pair_head}
        return {**pairs, **dict(self.classifiers.items())}

    def output_projection(self) -> tuple[Tensor, Tensor | None]:
        """Weight [V, E], the word embedding itself, and bias [V] of the vocabulary projection."""
        assert self.head is not None, "a model without a masked-LM head"
        weight = self.embeddings.word.weight
        if self.head.extra is not None:
            weight = torch.cat([weight, self.head.extra.t()], dim=1)
        return weight, self.head.bias

    def forward(
        self,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        masked_positions: Tensor | None = None,
        *,
        output_hidden_states: bool = False,
        output_attention_scores: bool = False,
    ) -> ModelOutput:
        """Logits at every position, or at the flat `masked_positions` [P] of B * L."""
        numbers = tuple(range(self.config.layers + 1))
        capture = Capture(
            hidden_states=numbers if output_hidden_states else (),
            attention=numbers[1:] if output_attention_scores else (),
            last_hidden_state=True,
        )
        found = self.features(input_ids, segment_ids, attention_mask, masked_positions, capture)
        output = ModelOutput(None, pooled=found.pooled, heads=found.heads)
        if found.vocabulary_input is not None:
            logits = F.linear(found.vocabulary_input, *self.output_projection())
            is_flat = masked_positions is not None
            output.logits = logits if is_flat else logits.unflatten(0, input_ids.shape)
        if output_hidden_states:
            output.hidden_states = tuple(found.hidden_states[i] for i in numbers)
        if output_attention_scores:
            output.attention_scores = tuple(
                self._scores(i, found.attention[i], attention_mask) for i in numbers[1:]
            )
        return output

    def _scores(self, number: int, qkv: QKV, attention_mask: Tensor | None) -> Tensor:
        window, length = self.config.window(number), qkv.q.shape[2]
        visible = visible_keys(attention_mask, length, window, qkv.q.device)
        return attention_scores(qkv.q, qkv.k, visible)
