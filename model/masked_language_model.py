"""The encoder with its heads: what is trained, captured and exported."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.attention import QKV
from model.attention_kernel import attention_scores, visible_keys
from model.config import PAIRS, EncoderConfig
from model.crf import Transitions
from model.embedding import Embeddings
from model.encoder import Capture, Encoded, Encoder
from model.heads import MaskedLanguageModelHead, Pooler, TaskHead, mean_over_tokens
from model.precision import Dense
from model.task_head_config import TaskHeadConfig

NOTHING = Capture()
RECOMPILE_LIMIT = 1024


@dataclass
class Features:
    """What objectives read. All tensors are in the graph; nothing has been copied for them.

    vocabulary_input: [P, E], the vocabulary projection's input at the masked positions ([B * L, E]
        when none were given), None without a masked-LM head. hidden_states: number -> [B, L, H].
        attention: number -> QKV. last_hidden_state: [B, L, H] and pooled: [B, H], None unless
        captured (or no positions were given). heads: by name, the output [B, outputs] of heads that
        have one per text, and [B, L, outputs] of those that have one per token: the pair head where
        `pooled` is not None, and the task heads that were captured. transitions: by name, those of
        task heads with a CRF. all_positions: [B * L, E], the projection's input at every position,
        or None.
    """

    vocabulary_input: Tensor | None
    hidden_states: dict[int, Tensor]
    attention: dict[int, QKV]
    last_hidden_state: Tensor | None
    pooled: Tensor | None
    heads: dict[str, Tensor]
    transitions: dict[str, Transitions] = field(default_factory=dict)
    all_positions: Tensor | None = None


@dataclass
class ModelOutput:
    """Result of calling the model; what was not asked for is None.

    logits: [B, L, V], or [P, V] at masked positions; None without a masked-LM head. hidden_states:
    N + 1 of [B, L, H].
    attention_scores: N of [B, A, L, L], scaled, before the softmax, the dtype's lowest value at
    hidden keys. pooled: [B, H]. heads: the output of each other head, by name: [B, outputs], or
    [B, L, outputs] of one that has an output per token.
    """

    logits: Tensor | None
    hidden_states: tuple[Tensor, ...] | None = None
    attention_scores: tuple[Tensor, ...] | None = None
    pooled: Tensor | None = None
    heads: dict[str, Tensor] = field(default_factory=dict)


class MaskedLanguageModel(nn.Module):
    """An encoder with a masked-LM head tied to its word embedding, a pair head, and task heads.

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
        self.task_heads = nn.ModuleDict(
            {name: TaskHead(config, head) for name, head in config.task_heads.items()}
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

        All models of a process share what torch counts its recompilations by. A job has as many as
        models x (training, evaluation, masked rows only) x sequence lengths, and beyond a limit
        torch would run a layer uncompiled without a word: here it is far off, and an error.
        """
        from torch._dynamo import config

        config.recompile_limit = config.accumulated_recompile_limit = RECOMPILE_LIMIT
        config.fail_on_recompile_limit_hit = True
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
        model's, saved); or nothing but each text's first token, where task heads that read only
        that are all that is asked for. Rounding differs from the whole layer's.
        """
        capture = replace(capture, hidden_states=self._hidden_states_read(capture))
        rows = self._rows_read(input_ids, masked_positions, capture)
        x = self.embeddings(input_ids, segment_ids)
        encoded = self.encoder(x, attention_mask, capture, rows)
        states = encoded.last_hidden_state
        last = states if rows is None else None
        first = states if rows is not masked_positions else None
        all_positions = None
        if last is not None:
            first, states = last[:, 0], last.flatten(0, 1)
            # A pass of its own: the bits at masked positions are the same with and without it.
            all_positions = self._transform(states) if capture.all_positions else None
            if masked_positions is not None:
                states = states.index_select(0, masked_positions)
        pooled = None if self.pooler is None or first is None else self.pooler(first)
        found = Features(
            vocabulary_input=self._transform(states),
            hidden_states=encoded.hidden_states,
            attention=encoded.attention,
            last_hidden_state=last,
            pooled=pooled,
            heads={},
            all_positions=all_positions,
        )
        if self.pair_head is not None and pooled is not None:
            found.heads[PAIRS] = self.pair_head(pooled)
        self._run_task_heads(capture.heads, found, first, attention_mask)
        return found

    def _transform(self, states: Tensor) -> Tensor | None:
        """The vocabulary projection's input [..., E], where there is a masked-LM head."""
        return None if self.head is None else self.head(states)

    def _hidden_states_read(self, capture: Capture) -> tuple[int, ...]:
        """The numbers of the hidden states that are captured, or read by a captured head."""
        heads = [self.config.task_heads[name] for name in capture.heads]
        read = {layer % (self.config.layers + 1) for head in heads for layer in head.layers}
        return tuple(sorted({*capture.hidden_states, *read}))

    def _rows_read(
        self, input_ids: Tensor, masked_positions: Tensor | None, capture: Capture
    ) -> Tensor | None:
        """The flat positions of B * L that the last layer must compute; None: all."""
        heads = [self.config.task_heads[name] for name in capture.heads]
        if capture.reads_last_layer(self.config.layers):
            return None
        if not heads:
            return masked_positions
        if self.head is not None or not all(head.reads_first_token for head in heads):
            return None
        return torch.arange(0, input_ids.numel(), input_ids.shape[1], device=input_ids.device)

    def _run_task_heads(
        self,
        names: Collection[str],
        found: Features,
        first: Tensor | None,
        attention_mask: Tensor | None,
    ) -> None:
        """Add the outputs of these task heads, and the transitions of their CRFs, to `found`."""
        for name in names:
            head = self.task_heads[name]
            assert isinstance(head, TaskHead)
            found.heads[name] = head(self._head_input(head.head, found, first, attention_mask))
            if head.crf is not None:
                found.transitions[name] = head.crf()

    def _head_input(
        self,
        head: TaskHeadConfig,
        found: Features,
        first: Tensor | None,
        attention_mask: Tensor | None,
    ) -> Tensor:
        """What a task head reads: [B, size], or [B, L, size] where it has an output per token."""
        if head.reads_first_token:
            read = found.pooled if head.pooling == "pooler" else first
            assert read is not None, "a task head that is captured has the states that it reads"
            return read
        states = found.last_hidden_state
        if head.layers:
            count = self.config.layers + 1
            chosen = [found.hidden_states[layer % count] for layer in head.layers]
            states = torch.cat(chosen, dim=-1)
        assert states is not None
        if head.per_token:
            return states
        return states[:, 0] if head.pooling == "first" else mean_over_tokens(states, attention_mask)

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
            heads=tuple(self.task_heads),
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
