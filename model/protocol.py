"""The protocol between the trainer and every kind of model, and the registry of kinds.

A kind is a config (`ModelConfig`) and a module (`Model`) that is registered for it. The names of a
module's parameters are part of the protocol: ``embeddings.word.``, ``encoder.PART.N.`` for layer N
from 0, ``pooler.``, and those of the heads (`HEADS`). Stacking, layer-by-layer transfer and
initialisation from a teacher's layers rely on them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from configs.kinds import add_kind, chosen, require_new
from model.attention_kernel import attention_scores, visible_keys
from model.documents import AttentionMask, Documents, Padded, without_count
from model.errors import ModelError
from model.generation import Decoding
from model.heads import (
    BranchedHead,
    MaskedLanguageModelHead,
    ProjectionParts,
    TaskHead,
    Transitions,
    first_token,
    mean_over_tokens,
    vocabulary_logits,
)
from model.model_config import PAIRS, Ability, ModelConfig
from model.precision import Dense
from model.task_head_config import TaskHeadConfig


class QKV(NamedTuple):
    """The queries, keys and values of a layer, [B, heads, L, head_size] each."""

    q: Tensor
    k: Tensor
    v: Tensor | None = None


@dataclass(frozen=True)
class Capture:
    """The intermediate states and outputs that a forward pass returns, by layer number.

    Hidden state 0 is the embedding output, hidden state i the output of layer i, from 1 to N.
    Attention layers are numbered from 1 to N; they give queries and keys, and with `values` all
    three. `all_positions` asks for the vocabulary projection's input at every position, in addition
    to the masked ones. `last_hidden_state` asks for that state at every position, and for the
    pooled state. A caller that reads neither should leave it off: it gets the same losses and
    gradients for less work. `heads` are the names of the task heads to run. `exits` are layers
    whose output the masked-LM head reads, as it reads the last layer's. `branches` are task heads
    whose earlier branches are to run.
    """

    hidden_states: tuple[int, ...] = ()
    attention: tuple[int, ...] = ()
    values: bool = False
    all_positions: bool = False
    last_hidden_state: bool = False
    heads: tuple[str, ...] = ()
    exits: tuple[int, ...] = ()
    branches: tuple[str, ...] = ()


NOTHING = Capture()


class Encoded(NamedTuple):
    """The last hidden state, [B, L, H] or [P, H], and the captured tensors, still in the graph.

    It is a tuple, because DeepSpeed searches a module's result for tensors.
    """

    last_hidden_state: Tensor
    hidden_states: dict[int, Tensor]
    attention: dict[int, QKV]

    def at(self, rows: Tensor | None) -> Encoded:
        """With the last hidden state at these flat positions of B * L alone; None: at all."""
        if rows is None:
            return self
        last = self.last_hidden_state.flatten(0, 1).index_select(0, rows)
        return self._replace(last_hidden_state=last)


@dataclass
class Features:
    """The tensors that objectives read. All are in the graph; nothing is copied for them.

    vocabulary_input: [P, E], the vocabulary projection's input at the masked positions ([B * L, E]
        when none were given), None without a masked-LM head. hidden_states: number -> [B, L, H].
        attention: number -> QKV. last_hidden_state: [B, L, H] and pooled: [B, H], None unless
        captured (or no positions were given). heads: by name, the output [B, outputs] of heads that
        have one per text, and [B, L, outputs] of those that have one per token: the pair head where
        `pooled` is not None, and the task heads that were captured. transitions: by name, those of
        task heads with a CRF. all_positions: [B * L, E], the projection's input at every position,
        or None. exits: number -> what `vocabulary_input` would be if that layer were the last.
        branches: by name of the head, [layers - 1, B, labels], from detached states.
    """

    vocabulary_input: Tensor | None
    hidden_states: dict[int, Tensor]
    attention: dict[int, QKV]
    last_hidden_state: Tensor | None
    pooled: Tensor | None
    heads: dict[str, Tensor]
    transitions: dict[str, Transitions] = field(default_factory=dict)
    all_positions: Tensor | None = None
    exits: dict[int, Tensor] = field(default_factory=dict)
    branches: dict[str, Tensor] = field(default_factory=dict)


class EarlyOutputs(NamedTuple):
    """The answers of a model that examples leave early: logits [B, labels], layers int64 [B].

    `layers` are numbered from 1: the last one that each example passed.
    """

    logits: Tensor
    layers: Tensor


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


HEADS = ("head.", "pair_head.", "task_heads.")  # name prefixes of the heads' parameters
READ_OUT = ("pooler.", *HEADS)  # and of all parameters above the encoder

_MODULES: dict[type[ModelConfig], type[Model]] = {}
_Module = TypeVar("_Module", bound="type[Model]")


def register(config: type[ModelConfig]) -> Callable[[_Module], _Module]:
    """A decorator: registers the module of `config`, whose kind joins those of ``model.kind``.

    Raises TypeError as `require_new`.
    """

    def note(module: _Module) -> _Module:
        require_new(module, Model, {}, config.__name__)
        add_kind(ModelConfig, config)
        _MODULES[config] = module
        return module

    return note


def default_model() -> ModelConfig:
    """The model of a job whose config has no model section."""
    return chosen(ModelConfig, {})()


def module_of(config: ModelConfig) -> type[Model]:
    """The module class of a config's kind."""
    return _MODULES[type(config)]


class Model(nn.Module, ABC):
    """A model with a masked-LM head tied to its word embedding, a pair head, and task heads.

    A kind creates the parts below and defines `encode`. Captured tensors are references to those of
    the ordinary forward pass, still in the graph.
    """

    config: ModelConfig
    pooler: nn.Module | None
    head: nn.Module | None  # from hidden states to the vocabulary projection's input
    pair_head: nn.Module | None
    task_heads: nn.ModuleDict
    # Operators with matrix products that ``torch.utils.flop_counter`` does not know: their FLOPs,
    # from the shapes of their operands.
    kernel_flops: ClassVar[Mapping[Any, Callable[..., int]]] = {}
    reads_padded: ClassVar[bool] = False  # whether `encode` takes `Padded`, or its lengths

    def add_heads(self) -> None:
        """Make the heads that the config names; a kind's constructor calls this last."""
        config = self.config
        self.head = MaskedLanguageModelHead(config) if config.mlm_head else None
        self.pair_head = Dense(config.pooled_size, 2) if config.pair_head else None
        self.task_heads = nn.ModuleDict(
            {
                name: BranchedHead(config, head.outputs)
                if head.branches
                else TaskHead(config, head)
                for name, head in config.task_heads.items()
            }
        )

    @abstractmethod
    def encode(
        self,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        capture: Capture = NOTHING,
        rows: Tensor | None = None,
    ) -> Encoded:
        """Embeddings and layers only. Ids int64 [B, L]; the mask [B, L] is nonzero at real tokens.

        With `rows` int64 [P] the last hidden state is [P, H], at these flat positions of B * L.

        Where padding only follows the tokens, the mask may instead be int64 [B], the number of real
        tokens in each row, so that attention kernels can skip the padding. Pass no mask when
        nothing is padded: kernels without a mask are faster.
        """

    def readable(self, attention_mask: AttentionMask | Padded | None) -> Any:
        """The mask, as `encode` takes it. Raises ModelError for `Documents` that it cannot read."""
        if isinstance(attention_mask, Documents):
            needs = [Ability.DOCUMENTS, *([Ability.CAUSAL] if attention_mask.is_causal else [])]
            for why in filter(None, map(self.config.cannot, needs)):
                raise ModelError(f"attention_mask: {why}")
        return attention_mask if self.reads_padded else without_count(attention_mask)

    def as_last(self, states: Tensor) -> Tensor:
        """States of an earlier layer, [..., H], as they would leave the encoder had it no more."""
        return states

    def output_projection(
        self, parts: ProjectionParts | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Weight [V, E] and bias [V] of the vocabulary projection of a masked-LM head.

        The weight is None where the projection's input is the logits themselves. `parts` may be
        copies of its parts, where ZeRO 3 has the parameters.
        """
        word, bias, extra = parts or self.projection_parts()
        if word is None or extra is None:
            return word, bias
        return torch.cat([word, extra.t()], dim=1), bias

    @abstractmethod
    def projection_parts(self) -> ProjectionParts:
        """The parameters of which the vocabulary projection is made."""

    @abstractmethod
    def fill(
        self, module: nn.Module, key: str, name: str, parameter: Tensor, generator: torch.Generator
    ) -> None:
        """Set the parameter `key` of a `module`, `name` in the model, to its initial value."""

    @abstractmethod
    def flops_per_token(self, length: int, masked_fraction: float) -> float:
        """FLOPs of the matrix products in a forward pass, per token (`model.accounting`)."""

    def word_vectors(self, input_ids: Tensor) -> Tensor:
        """The word embedding's rows for int64 [...]: [..., E]."""
        return self.get_submodule("embeddings.word")(input_ids)

    def leave_early(
        self,
        name: str,
        speed: float,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> EarlyOutputs:
        """The task head `name`'s answer about each example, after the first layer that is certain.

        That is a layer whose branch has an uncertainty (`model.heads`) less than `speed`. Inputs
        are as in `encode` (`Ability.LEAVE_EARLY`).
        """
        raise NotImplementedError

    def decoding(self, source_ids: Tensor, lengths: Tensor | None) -> Decoding:
        """The decoding of targets of these sources, int64 [N, S] (`Ability.GENERATE`).

        `lengths` int64 [N] are the numbers of their tokens, where some are padded.
        """
        raise NotImplementedError

    def checkpoint_activations(self) -> None:
        """Store only each layer's input, and recompute the rest (`Ability.CHECKPOINT`)."""
        raise NotImplementedError

    def use_float8(self) -> None:
        """Compute the products of the layers in 8 bits (`Ability.FLOAT8`)."""
        raise NotImplementedError

    def compile_layers(self, dynamic: bool = False, **options: Any) -> None:
        """Run the layers through ``torch.compile`` with these options (`Ability.COMPILE`).

        `dynamic`: one compilation serves all batch sizes and lengths; else each has its own.
        """
        raise NotImplementedError

    def run_layers_by(self, run: Callable[..., tuple[Tensor, ...]]) -> None:
        """Let `run`, called with a layer's function and its arguments, run every layer.

        Where layers have weights in common, are recomputed, or are no functions, it is not used.
        """

    def share_embedding(self, table: Tensor) -> None:
        """Add the word embedding to this `table` [V, E] (`Ability.SHARE_EMBEDDING`)."""
        raise NotImplementedError

    def set_rope_theta(self, base: float) -> None:
        """Turn by this base in the global layers, where positions are rotary."""

    def freeze_positions(self) -> None:
        """Do not train the position embeddings (`Ability.FREEZE_POSITIONS`)."""
        raise NotImplementedError

    def features(
        self,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        attention_mask: AttentionMask | Padded | None = None,
        masked_positions: Tensor | None = None,
        capture: Capture = NOTHING,
        numbers: Tensor | None = None,
    ) -> Features:
        """The training path: everything up to, but not including, the vocabulary projection.

        Where rows hold several `Documents`, a text is a document or the padding of a row: pooled
        states and heads' outputs are those of the N texts.

        `masked_positions` int64 [P] indexes the flattened B * L; the head's transform runs there
        only. `numbers` [B, K] are for a task head that reads such (`TaskHeadConfig`). Losses
        project `vocabulary_input` with `output_projection()` in chunks.
        """
        capture = replace(capture, hidden_states=self._hidden_states_read(capture))
        mask: Any = self.readable(attention_mask)
        rows = self.rows_read(input_ids, masked_positions, capture)
        if rows is not masked_positions and isinstance(mask, Documents):
            rows = None  # not the first tokens of rows, but those of documents are read
        encoded = self.encode(input_ids, segment_ids, mask, capture, rows)
        mask = without_count(mask)
        states = encoded.last_hidden_state
        last = states if rows is None else None
        first = states if rows is not masked_positions else None
        all_positions = None
        if last is not None:
            first, states = first_token(last, mask), last.flatten(0, 1)
            # Separate, so that the bits at masked positions do not depend on it.
            all_positions = self._transform(states) if capture.all_positions else None
            if masked_positions is not None:
                states = states.index_select(0, masked_positions)
        reads_texts = capture.last_hidden_state or capture.heads or masked_positions is None
        pooled = self.pool(first, last, segment_ids, mask) if reads_texts else None
        features = Features(
            vocabulary_input=self._transform(states),
            hidden_states=encoded.hidden_states,
            attention=encoded.attention,
            last_hidden_state=last,
            pooled=pooled,
            heads={},
            all_positions=all_positions,
        )
        self._run_heads(capture, features, first, masked_positions, mask, numbers)
        return features

    def rows_read(
        self, input_ids: Tensor, masked_positions: Tensor | None, capture: Capture
    ) -> Tensor | None:
        """The flat positions of B * L that the last layer must compute; None: all."""
        last = self.config.layers
        if capture.last_hidden_state or capture.all_positions or last in capture.hidden_states:
            return None
        if not capture.heads:
            return masked_positions
        heads = [self.config.task_heads[name] for name in capture.heads]
        if self.head is not None or not all(head.reads_first_token for head in heads):
            return None
        return torch.arange(0, input_ids.numel(), input_ids.shape[1], device=input_ids.device)

    def pool(
        self,
        first: Tensor | None,
        last: Tensor | None,
        segment_ids: Tensor | None,
        attention_mask: Tensor | None,
    ) -> Tensor | None:
        """The pooled state [B, W] of the first tokens' states [B, H], or of all: [B, L, H]."""
        if self.pooler is None or first is None:
            return None
        return self.pooler(first)

    def forward(
        self,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        attention_mask: AttentionMask | None = None,
        masked_positions: Tensor | None = None,
        *,
        numbers: Tensor | None = None,
        output_hidden_states: bool = False,
        output_attention_scores: bool = False,
    ) -> ModelOutput:
        """Logits at every position, or at the flat `masked_positions` [P] of B * L.

        `numbers` are as in `features`. Raises ModelError where a task head lacks them, and for the
        attention scores of a model without attention.
        """
        if output_attention_scores and not self.config.attention_width:
            raise ModelError(
                f"output_attention_scores: kind {self.config.kind} has no attention scores of "
                "queries and keys alone"
            )
        layers = tuple(range(self.config.layers + 1))
        capture = Capture(
            hidden_states=layers if output_hidden_states else (),
            attention=layers[1:] if output_attention_scores else (),
            last_hidden_state=True,
            heads=tuple(self.task_heads),
        )
        features = self.features(
            input_ids, segment_ids, attention_mask, masked_positions, capture, numbers
        )
        output = ModelOutput(None, pooled=features.pooled, heads=features.heads)
        if features.vocabulary_input is not None:
            logits = vocabulary_logits(features.vocabulary_input, *self.output_projection())
            is_flat = masked_positions is not None
            output.logits = logits if is_flat else logits.unflatten(0, input_ids.shape)
        if output_hidden_states:
            output.hidden_states = tuple(features.hidden_states[i] for i in layers)
        if output_attention_scores:
            output.attention_scores = tuple(
                self._scores(i, features.attention[i], attention_mask) for i in layers[1:]
            )
        return output

    def _transform(self, states: Tensor) -> Tensor | None:
        """The vocabulary projection's input [..., E], where there is a masked-LM head."""
        return None if self.head is None else self.head(states)

    def _hidden_states_read(self, capture: Capture) -> tuple[int, ...]:
        """The hidden states that are captured, or that exits and heads read; ascending."""
        heads = self.config.task_heads
        read = {number for name in capture.heads for number in self._numbers(heads[name])}
        below = range(1, self.config.layers) if capture.branches else ()
        return tuple(sorted({*capture.hidden_states, *capture.exits, *read, *below}))

    def _numbers(self, head: TaskHeadConfig) -> list[int]:
        """The hidden states that a head reads, counted from the first; -1 is the last layer's."""
        return [layer % (self.config.layers + 1) for layer in head.layers]

    def _exit(self, states: Tensor, masked_positions: Tensor | None) -> Tensor:
        """The vocabulary projection's input [P, E], computed by the head from states [B, L, H]."""
        rows = states.flatten(0, 1)
        if masked_positions is not None:
            rows = rows.index_select(0, masked_positions)
        projected = self._transform(self.as_last(rows))
        assert projected is not None, "exits of a model without a masked-LM head"
        return projected

    def _run_heads(
        self,
        capture: Capture,
        features: Features,
        first: Tensor | None,
        masked_positions: Tensor | None,
        attention_mask: Tensor | None,
        numbers: Tensor | None,
    ) -> None:
        """Add the outputs of the pair head, exits, task heads and their branches to `features`.

        The transitions of task heads' CRFs, too.
        """
        if self.pair_head is not None and features.pooled is not None:
            features.heads[PAIRS] = self.pair_head(features.pooled)
        for layer in capture.exits:
            features.exits[layer] = self._exit(features.hidden_states[layer], masked_positions)
        for name in capture.branches:
            features.branches[name] = self._earlier(name, features.hidden_states, attention_mask)
        for name in capture.heads:
            head = self.task_heads[name]
            self._require_texts(name, attention_mask)
            if isinstance(head, BranchedHead):
                features.heads[name] = head.last(features.last_hidden_state, attention_mask)
                continue
            assert isinstance(head, TaskHead)
            read = self._head_input(head.head, features, first, attention_mask)
            features.heads[name] = head(read, numbers, attention_mask)
            if head.crf is not None:
                features.transitions[name] = head.crf()

    def _require_texts(self, name: str, attention_mask: AttentionMask | None) -> None:
        """Raise ModelError where a head that reads all of a row would read several documents."""
        head = self.config.task_heads[name]
        if isinstance(attention_mask, Documents) and (head.branches or head.module):
            raise ModelError(f"task_heads.{name}: reads whole rows; give one document in each row")

    def _earlier(
        self, name: str, states: Mapping[int, Tensor], attention_mask: Tensor | None
    ) -> Tensor:
        """The logits of a head's branches below the last layer, [layers - 1, B, labels]."""
        head = self.task_heads[name]
        assert isinstance(head, BranchedHead)
        below = [states[number] for number in range(1, self.config.layers)]
        return head.earlier(below, attention_mask)

    def _head_input(
        self,
        head: TaskHeadConfig,
        features: Features,
        first: Tensor | None,
        attention_mask: AttentionMask | None,
    ) -> Tensor:
        """The input of a task head: [B, size], or [B, L, size] where it has an output per token."""
        if head.reads_first_token:
            read = features.pooled if head.pooling == "pooler" else first
            assert read is not None, "a task head that is captured has the states that it reads"
            return read
        states = features.last_hidden_state
        if head.layers:
            chosen = [features.hidden_states[number] for number in self._numbers(head)]
            states = torch.cat(chosen, dim=-1)
        assert states is not None
        if head.per_token or head.module:
            return states
        pool = first_token if head.pooling == "first" else mean_over_tokens
        return pool(states, attention_mask)

    def _scores(self, number: int, qkv: QKV, attention_mask: AttentionMask | None) -> Tensor:
        window, length = self.config.window(number), qkv.q.shape[2]
        visible = visible_keys(attention_mask, length, window, qkv.q.device)
        return attention_scores(qkv.q, qkv.k, visible)
