"""What the students see of the teacher: captured once, detached, freed after the micro-batch.

The teacher runs its ordinary fast path whoever listens. Only references to tensors that the
forward pass makes anyway are kept; scores, relations and logits are derived inside the losses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from model import QKV, Capture, Features


@dataclass(frozen=True)
class Decoder:
    """A vocabulary projection: weight [V, E] and, where the family has one, bias [V]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Knowledge:
    """A teacher's detached view of one micro-batch (shapes as in `model.Features`)."""

    vocabulary_input: Tensor  # [P, E]
    last_hidden_state: Tensor  # [B, L, H]
    hidden_states: dict[int, Tensor]  # layer -> [B, L, H]; 0 is the embedding output
    attention: dict[int, QKV]  # layer, from 1 -> queries, keys, values, each [B, A, L, D]
    decoder: Decoder | None  # None when no student asked for logits
    everywhere: Tensor | None = None  # [B * L, E], where a student asked for every position


def detach(features: Features, decoder: Decoder | None) -> Knowledge:
    """The knowledge in a teacher's `features`."""
    return Knowledge(
        vocabulary_input=features.vocabulary_input.detach(),
        last_hidden_state=features.last_hidden_state.detach(),
        hidden_states={layer: state.detach() for layer, state in features.hidden_states.items()},
        attention={
            layer: QKV(*(tensor.detach() for tensor in qkv))
            for layer, qkv in features.attention.items()
        },
        decoder=decoder,
        everywhere=None if features.everywhere is None else features.everywhere.detach(),
    )


def union(captures: Iterable[Capture]) -> Capture:
    """Everything that anyone asks for."""
    captures = list(captures)
    return Capture(
        hidden_states=tuple(sorted({n for one in captures for n in one.hidden_states})),
        attention=tuple(sorted({n for one in captures for n in one.attention})),
        everywhere=any(one.everywhere for one in captures),
    )
