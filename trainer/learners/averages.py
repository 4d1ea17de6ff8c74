"""A learner's averaged weights in its engine: reading them as its model, and averaging checkpoints.

Everything is collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from trainer.checkpoint.layout import FROZEN, layout, refresh, torch_optimizer
from trainer.checkpoint.reader import Checkpoint
from trainer.optimizers.averages import AVERAGE

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def has_means(engine: DeepSpeedEngine) -> bool:
    """Whether there are means of the weights: after the first step, or checkpoint."""
    optimizer = torch_optimizer(engine)
    return optimizer is not None and any(AVERAGE in state for state in optimizer.state.values())


@contextlib.contextmanager
def averaged(engine: DeepSpeedEngine) -> Iterator[None]:
    """Give the model its averaged weights in the block, and its own afterwards, to the last bit.

    A parameter without a mean, which has never been trained, keeps its weights.
    """
    _exchange(engine)
    try:
        yield
    finally:
        _exchange(engine)


@torch.no_grad()
def _exchange(engine: DeepSpeedEngine) -> None:
    """Exchange weights and means, without a copy of all of them."""
    optimizer = torch_optimizer(engine)
    assert optimizer is not None
    for holder, state in optimizer.state.items():
        if AVERAGE in state:
            weights = holder.detach().clone()
            holder.data.copy_(state[AVERAGE])
            state[AVERAGE].copy_(weights)
    refresh(engine)


@torch.no_grad()
def average_checkpoints(engine: DeepSpeedEngine, name: str, earlier: Sequence[Checkpoint]) -> None:
    """Set the means to the mean of the current weights and the weights in `earlier` checkpoints.

    Checkpoints without this learner, or with another shape of it, do not count.
    """
    optimizer = torch_optimizer(engine)
    assert optimizer is not None
    pieces = [piece for piece in layout(engine) if piece.group != FROZEN]
    shapes = {piece.name: list(piece.shape) for piece in pieces}
    readers = [
        checkpoint.weights_of(name) for checkpoint in earlier if checkpoint.fits(name, shapes)
    ]
    for piece in pieces:
        total = piece.of(piece.holder).clone()
        for read in readers:
            total += read(piece)
        state = optimizer.state[piece.holder]
        if AVERAGE not in state:
            state[AVERAGE] = torch.zeros_like(piece.holder, requires_grad=False)
        piece.of(state[AVERAGE]).copy_(total / (1 + len(readers)))
