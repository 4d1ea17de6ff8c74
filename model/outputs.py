"""The request to a model's forward pass, and its results."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from model.heads import Transitions


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
