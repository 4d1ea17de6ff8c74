"""Loading a stored learner into an engine with any partitioning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.layout import FROZEN, Piece, layout, refresh, torch_optimizer
from trainer.checkpoint.manifest import LearnerRecord, TensorRecord
from trainer.checkpoint.scalars import decode_scalar, restore_counters, restore_loss_scale
from trainer.checkpoint.snapshot import MASTER

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class Source(Protocol):
    """Reads stored values."""

    def fill(self, name: str, record: TensorRecord, state: str, start: int, out: Tensor) -> None:
        """Copy the elements ``[start, start + out.numel())`` of one state into ``out`` [numel]."""


@torch.no_grad()
def restore(engine: DeepSpeedEngine, saved: LearnerRecord, source: Source) -> None:
    """Overwrite a freshly initialised engine with a stored learner; collective.

    Raises:
        CheckpointError: the engine's parameters differ; nothing has been overwritten.
    """
    pieces = layout(engine)
    optimizer = torch_optimizer(engine)
    holders = _by_holder(pieces)
    _check_same_parameters(pieces, saved.tensors)
    for held in holders:
        _check_same_scalars(held, saved.tensors)
    for piece in pieces:
        if piece.group == FROZEN:
            _fill(piece, MASTER, piece.holder, saved.tensors, source)
    for held in holders:
        _restore_holder(held, optimizer, saved.tensors, source)
    refresh(engine)
    restore_loss_scale(engine, saved.engine["loss_scale"])
    restore_counters(engine, saved.engine)


def _by_holder(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """The optimized pieces, grouped by flat tensor."""
    holders: dict[int, list[Piece]] = {}
    for piece in pieces:
        if piece.group != FROZEN:
            holders.setdefault(id(piece.holder), []).append(piece)
    return list(holders.values())


def _check_same_parameters(pieces: Sequence[Piece], saved: Mapping[str, TensorRecord]) -> None:
    here = {piece.name: piece for piece in pieces}
    for name in sorted(here.keys() | saved.keys()):
        if name not in saved:
            raise CheckpointError(f"the model's {name} is not in the checkpoint")
        if name not in here:
            raise CheckpointError(f"the checkpoint's {name} is not in the model")
        piece, record = here[name], saved[name]
        if list(piece.shape) != record.shape:
            raise CheckpointError(
                f"{name} has shape {list(piece.shape)} in the model and {record.shape} stored"
            )
        if record.group == FROZEN != piece.group:
            raise CheckpointError(f"{name} is trained, but frozen in the checkpoint")


def _check_same_scalars(held: Sequence[Piece], saved: Mapping[str, TensorRecord]) -> None:
    """The scalars of a flat tensor's state (its step) must be equal for all parameters in it."""
    first = saved[held[0].name]
    for piece in held:
        record = saved[piece.name]
        if record.scalars != first.scalars or record.states.keys() != first.states.keys():
            raise CheckpointError(
                f"{piece.name} and {held[0].name} have made different numbers of optimizer steps, "
                "so they cannot share a ZeRO partition; resume with zero_stage: 0"
            )


def _restore_holder(
    held: Sequence[Piece],
    optimizer: torch.optim.Optimizer | None,
    saved: Mapping[str, TensorRecord],
    source: Source,
) -> None:
    assert optimizer is not None
    holder, first = held[0].holder, saved[held[0].name]
    # Padding may be uninitialised memory (stage 3), which would corrupt norms.
    holder.data.zero_()
    device = _scalar_device(optimizer.param_groups[held[0].group], holder)
    # Every holder needs its own scalars: torch increments `step` in place.
    state = {key: decode_scalar(value, device) for key, value in first.scalars.items()}
    for key, dtype in first.states.items():
        if key != MASTER:
            state[key] = torch.zeros_like(holder, dtype=getattr(torch, dtype), requires_grad=False)
    for piece in held:
        for key in first.states:
            _fill(piece, key, holder if key == MASTER else state[key], saved, source)
    optimizer.state[holder] = state


def _fill(
    piece: Piece, state: str, tensor: Tensor, saved: Mapping[str, TensorRecord], source: Source
) -> None:
    """Read a piece of one state; what every rank holds whole, rank 0 reads for all of them."""
    out = piece.of(tensor)
    if not piece.replicated or dist.get_rank() == 0:
        source.fill(piece.name, saved[piece.name], state, piece.start, out)
    if piece.replicated:
        dist.broadcast(out, 0)


def _scalar_device(settings: Mapping[str, Any], holder: Tensor) -> torch.device:
    """Where torch expects `step`: beside the parameter if fused or capturable, else the CPU."""
    on_device = settings.get("fused") or settings.get("capturable")
    return holder.device if on_device else torch.device("cpu")
