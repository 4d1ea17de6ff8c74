"""The teacher's outputs that students read: captured once, detached, freed after the micro-batch.

The teacher runs its usual fast path, whatever its students read. Only references to tensors that
the forward pass computes anyway are kept; scores, relations and logits are derived in the losses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from data_pipeline import MASKED
from model import QKV, Capture, Features
from trainer.denominators import ATTENDED
from trainer.losses.vocabulary_projection import Distribution


@dataclass(frozen=True)
class OutputProjection:
    """A vocabulary projection: weight [V, E] and, where the family has one, bias [V]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class TeacherOutputs:
    """A teacher's detached view of one micro-batch (shapes as in `model.Features`)."""

    last_hidden_state: Tensor | None  # [B, L, H]; None where the teacher does not compute it
    hidden_states: dict[int, Tensor]  # layer -> [B, L, H]; 0 is the embedding output
    attention: dict[int, QKV]  # layer, from 1 -> queries, keys, values, each [B, A, L, D]
    heads: dict[str, Tensor]  # outputs of the task heads that students requested, by name
    # At masked positions, and at all positions where requested; empty if no student reads logits.
    distributions: dict[str, Distribution]


def detach(
    features: Features, projection: OutputProjection | None, logit_consumers: int = 1
) -> TeacherOutputs:
    """The part of a teacher's `features` that students read, under the teacher's autocast.

    `projection` is the teacher's; None if no student reads its logits. `logit_consumers` is the
    number of students that do. With several, what the first one computes is kept for the others.
    """
    last = features.last_hidden_state
    return TeacherOutputs(
        last_hidden_state=None if last is None else last.detach(),
        hidden_states={layer: state.detach() for layer, state in features.hidden_states.items()},
        attention={
            layer: QKV(*(tensor.detach() for tensor in qkv))
            for layer, qkv in features.attention.items()
        },
        heads={name: logits.detach() for name, logits in features.heads.items()},
        distributions={}
        if projection is None
        else _distributions(features, projection, logit_consumers),
    )


def _distributions(
    features: Features, projection: OutputProjection, logit_consumers: int
) -> dict[str, Distribution]:
    inputs = {MASKED: features.vocabulary_input, ATTENDED: features.all_positions}
    return {
        positions: Distribution(x, projection.weight, projection.bias, keep=logit_consumers > 1)
        for positions, x in inputs.items()
        if x is not None
    }


def union(captures: Iterable[Capture]) -> Capture:
    """A capture of everything that any of `captures` asks for."""
    captures = list(captures)
    return Capture(
        hidden_states=tuple(sorted({n for one in captures for n in one.hidden_states})),
        attention=tuple(sorted({n for one in captures for n in one.attention})),
        all_positions=any(one.all_positions for one in captures),
        last_hidden_state=any(one.last_hidden_state for one in captures),
        heads=tuple(sorted({name for one in captures for name in one.heads})),
        exits=tuple(sorted({n for one in captures for n in one.exits})),
    )
