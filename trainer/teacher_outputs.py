"""A teacher's outputs that students read: captured once, detached, freed after the micro-batch.

A teacher runs its usual fast path, whatever its students read. Only references to tensors that the
forward pass computes anyway are kept; scores, relations and logits are derived in the losses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from data_pipeline import MASKED
from model import QKV, Features
from trainer.batches import MicroLogits
from trainer.denominators import ATTENDED
from trainer.vocabulary_projection import Distribution, Projection, TopLogits


@dataclass(frozen=True)
class OutputProjection:
    """A vocabulary projection: weight [V, E] and, where the family has one, bias [V].

    weight: None where the projection's input is the logits themselves.
    """

    weight: Tensor | None
    bias: Tensor | None

    def detached(self) -> OutputProjection:
        """This projection, without gradients."""
        parts = self.weight, self.bias
        return OutputProjection(*(None if part is None else part.detach() for part in parts))

    def logits(self, x: Tensor) -> Projection | TopLogits:
        """The logits of P rows x [P, E], the projection's input."""
        if self.weight is None:
            return TopLogits(x.float(), None, x.shape[1])
        return Projection(x, self.weight, self.bias)


@dataclass(frozen=True)
class TeacherOutputs:
    """A teacher's detached view of one micro-batch (shapes as in `model.Features`).

    The mean of several teachers has heads and distributions only.
    """

    last_hidden_state: Tensor | None  # [B, L, H]; None where the teacher does not compute it
    hidden_states: dict[int, Tensor]  # layer -> [B, L, H]; 0 is the embedding output
    attention: dict[int, QKV]  # layer, from 1 -> queries, keys, values if read: [B, A, L, D]
    # Outputs of the task heads that students requested, by name: one for each teacher.
    heads: dict[str, tuple[Tensor, ...]]
    # At masked positions, and at all positions where requested; empty if no student reads logits.
    distributions: dict[str, Distribution]
    # The ids here of the reader's own tokens, int64 [V], -1: none; None: it has the same tokens.
    tokens: Tensor | None = None

    def unread(self) -> TeacherOutputs:
        """These outputs for a single student, without what others have computed of them."""
        fresh = {name: Distribution(*read.teachers) for name, read in self.distributions.items()}
        return dataclasses.replace(self, distributions=fresh)


UNREAD = TeacherOutputs(None, {}, {}, {}, {})  # of a teacher whose outputs nobody reads


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
            layer: QKV(*(tensor.detach() for tensor in qkv if tensor is not None))
            for layer, qkv in features.attention.items()
        },
        heads={name: (logits.detach(),) for name, logits in features.heads.items()},
        distributions={}
        if projection is None
        else _distributions(features, projection, logit_consumers),
    )


def _distributions(
    features: Features, projection: OutputProjection, logit_consumers: int
) -> dict[str, Distribution]:
    inputs = {MASKED: features.vocabulary_input, ATTENDED: features.all_positions}
    told = projection.detached()
    return {
        positions: Distribution(told.logits(x.detach()), keep=logit_consumers > 1)
        for positions, x in inputs.items()
        if x is not None
    }


def of_stored(stored: MicroLogits, vocabulary: int, logit_consumers: int) -> TeacherOutputs:
    """The outputs of a teacher whose logits at masked positions were stored."""
    top = TopLogits(stored.values, stored.ids, vocabulary)
    return TeacherOutputs(None, {}, {}, {}, {MASKED: Distribution(top, keep=logit_consumers > 1)})


def mean_of(teachers: Sequence[TeacherOutputs], logit_consumers: int) -> TeacherOutputs:
    """The mean of the predictions of `teachers`, for `logit_consumers` students.

    That of a task's head is over the teachers that have it. Students average the outputs of task
    heads themselves, which are small.
    """
    first = teachers[0]
    heads = {
        name: tuple(logits for teacher in teachers for logits in teacher.heads.get(name, ()))
        for name in dict.fromkeys(name for teacher in teachers for name in teacher.heads)
    }
    distributions = {
        positions: Distribution(
            *(part for teacher in teachers for part in teacher.distributions[positions].teachers),
            keep=logit_consumers > 1,
        )
        for positions in first.distributions
        if all(positions in teacher.distributions for teacher in teachers)
    }
    return TeacherOutputs(None, {}, {}, heads, distributions)
