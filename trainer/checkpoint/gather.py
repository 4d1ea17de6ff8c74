"""Gathering a live engine's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint.layout import Piece, layout

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@torch.no_grad()
def full_state_dict(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """The full master weights and persistent buffers of an engine, on every rank; collective.

    The tensors are copies on the CPU; floating point tensors are fp32, at any stage and precision.
    """
    return {piece.name: _gather(piece, engine.device) for piece in layout(engine)}


def _gather(piece: Piece, device: torch.device) -> Tensor:
    own = piece.of(piece.holder)
    if piece.replicated:
        full = own.clone()
    else:
        full = torch.zeros(piece.total, dtype=own.dtype, device=device)
        full[piece.start : piece.start + piece.numel].copy_(own)
        # The pieces do not overlap, so a sum of their bytes is exact (even of -0.0 and NaN).
        dist.all_reduce(full.view(torch.uint8))
    full = full.reshape(piece.shape).cpu()
    return full.float() if full.is_floating_point() else full
