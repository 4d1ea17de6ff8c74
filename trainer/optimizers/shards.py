"""Where whole parameters lie in what an optimizer is handed.

Under ZeRO that is a flat tensor with parts of many parameters, other parts on other ranks.
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

    They come in the same order on all ranks; a part may have no elements here. Padding between
    parts belongs to none.
    """

    pieces: Mapping[Tensor, Sequence[Piece]]  # by the tensor that the optimizer is handed
    device: torch.device  # where collectives run

    @classmethod
    def of(cls, engine: DeepSpeedEngine) -> Shards:
        """The parts as they lie now; they stay where they are while the engine lives."""
        pieces: dict[Tensor, list[Piece]] = {}
        for piece in layout(engine):
            if piece.group != FROZEN:
                pieces.setdefault(piece.holder, []).append(piece)
        return cls(pieces, engine.device)

    def cut(self, holder: Tensor, tensor: Tensor) -> list[Tensor]:
        """`tensor`, which is shaped like `holder`, as flat views, one for each parameter in it."""
        return [piece.of(tensor) for piece in self.pieces[holder]]

    def sum(self, holders: Sequence[Tensor], parts: Tensor) -> Tensor:
        """Numbers of the parts of `holders` [..., parts] summed over the ranks. Collective.

        Where every rank holds the whole, they come back as they are.
        """
        if all(piece.replicated for holder in holders for piece in self.pieces[holder]):
            return parts
        total = parts.to(self.device)
        dist.all_reduce(total)
        return total.to(parts.device)
