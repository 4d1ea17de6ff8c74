"""The location of the model's parameters in the tensors that ZeRO gives to an optimizer.

Under ZeRO these are flat tensors, which hold parts of many parameters; other ranks hold the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint.layout import FROZEN, Piece, layout

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


@dataclass(frozen=True)
class Shards:
    """The parts of parameters in each tensor that an engine optimizes on this rank.

    The order is the same on all ranks; a part may be empty on a rank. Padding between parts belongs
    to none of them.
    """

    pieces: Mapping[Tensor, Sequence[Piece]]  # by the tensor that the optimizer updates
    device: torch.device  # where collectives run

    @classmethod
    def of(cls, engine: DeepSpeedEngine) -> Shards:
        """The parts of an engine's parameters, which stay in place while the engine exists."""
        pieces: dict[Tensor, list[Piece]] = {}
        for piece in layout(engine):
            if piece.group != FROZEN:
                pieces.setdefault(piece.holder, []).append(piece)
        return cls(pieces, engine.device)

    def cut(self, holder: Tensor, tensor: Tensor) -> list[Tensor]:
        """Flat views of `tensor`, which is shaped like `holder`: one for each parameter in it."""
        return [piece.of(tensor) for piece in self.pieces[holder]]

    def sum(self, holders: Sequence[Tensor], parts: Tensor) -> Tensor:
        """Sum numbers of the parts of `holders`, [..., parts], over the ranks. Collective.

        Where every rank holds whole parameters, they are returned unchanged.
        """
        if all(piece.replicated for holder in holders for piece in self.pieces[holder]):
            return parts
        total = parts.to(self.device)
        dist.all_reduce(total)
        return total.to(parts.device)


def parameter_views(
    shards: Shards | None, holders: Sequence[Tensor], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """Views of `tensors`, which are shaped like `holders`, one view per model parameter."""
    if shards is None:
        return list(tensors)
    pairs = zip(holders, tensors, strict=True)
    return [view for holder, tensor in pairs for view in shards.cut(holder, tensor)]


class Tensorwise(torch.optim.Optimizer):
    """An optimizer that reads statistics of whole parameters.

    Without `shards` each tensor is a parameter; with `shards` they say which parts of the tensors
    make up a parameter.
    """

    shards: Shards | None = None
