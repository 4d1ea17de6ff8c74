"""The parameters in the tensors that ZeRO gives to an optimizer, and L2 norms of tensors.

Under ZeRO these are flat tensors, which hold parts of many parameters; other ranks hold the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint.layout import FROZEN, Piece, layout

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# Elements that a CPU sums in float32. It adds up one after the other, and of BERT's embedding the
# norm would be 0.2% off; in pieces of this size it is 1e-6. A GPU adds up in a tree.
PIECE = 2**18


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The squared L2 norm of each of `tensors`, float32, of which there is one: float64 [n]."""
    squares, counts = _squares(tensors)
    if len(squares) == len(tensors):
        return squares
    return torch.stack([of_tensor.sum() for of_tensor in squares.split(counts)])


def squared_norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The squared L2 norm of all `tensors`, float32, as if one: float64 [] on `device`."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    squares, _ = _squares(tensors)
    return squares.sum()


def _squares(tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """The squared L2 norms of pieces of the tensors, and how many pieces each tensor has."""
    pieces = [[x] if x.is_cuda else x.reshape(-1).split(PIECE) for x in tensors]
    norms = torch._foreach_norm([*chain.from_iterable(pieces)])
    return torch.stack(norms).double().square(), [len(of_tensor) for of_tensor in pieces]


GATHERED = 50_000_000  # elements of matrices from which on no more are gathered together


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


def parameter_shapes(shards: Shards | None, holders: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """The shape of each parameter in `holders`."""
    if shards is None:
        return [tuple(holder.shape) for holder in holders]
    return [piece.shape for holder in holders for piece in shards.pieces[holder]]


def map_matrices(
    shards: Shards | None,
    holders: Sequence[Tensor],
    tensors: Sequence[Tensor],
    function: Callable[[Tensor], Tensor],
) -> None:
    """Replace each matrix in `tensors`, which are shaped like `holders`, by `function` of it.

    Collective where ranks hold parts: each gathers all, and computes its share of the matrices.
    """
    if shards is None:
        for tensor in tensors:
            tensor.copy_(function(tensor))
        return
    pairs = zip(holders, tensors, strict=True)
    parts = [(piece, tensor) for holder, tensor in pairs for piece in shards.pieces[holder]]
    if all(piece.replicated for piece, _ in parts):
        for piece, tensor in parts:
            piece.of(tensor).copy_(function(piece.of(tensor).view(piece.shape)).reshape(-1))
        return
    at, elements = 0, 0
    for end, (piece, _) in enumerate(parts, 1):
        elements += piece.total
        if elements >= GATHERED or end == len(parts):
            _map_gathered(parts[at:end], function, shards.device)
            at, elements = end, 0


def _map_gathered(
    parts: Sequence[tuple[Piece, Tensor]],
    function: Callable[[Tensor], Tensor],
    device: torch.device,
) -> None:
    """`map_matrices` of pieces that are gathered together: two collectives."""
    sizes = [piece.total for piece, _ in parts]
    gathered = torch.zeros(sum(sizes), device=device)
    matrices = gathered.split(sizes)
    for (piece, tensor), matrix in zip(parts, matrices, strict=True):
        matrix.narrow(0, piece.start, piece.numel).copy_(piece.of(tensor))
    dist.all_reduce(gathered)
    for number, ((piece, _), matrix) in enumerate(zip(parts, matrices, strict=True)):
        if number % dist.get_world_size() == dist.get_rank():
            matrix.copy_(function(matrix.view(piece.shape)).reshape(-1))
        else:
            matrix.zero_()
    dist.all_reduce(gathered)
    for (piece, tensor), matrix in zip(parts, matrices, strict=True):
        piece.of(tensor).copy_(matrix.narrow(0, piece.start, piece.numel))


def parameter_sizes(shards: Shards | None, holders: Sequence[Tensor]) -> list[int]:
    """The elements of each parameter in `holders`, those on other ranks included."""
    if shards is None:
        return [holder.numel() for holder in holders]
    return [piece.total for holder in holders for piece in shards.pieces[holder]]


class Tensorwise(torch.optim.Optimizer):
    """An optimizer that reads statistics of whole parameters.

    Without `shards` each tensor is a parameter; with `shards` they say which parts of the tensors
    make up a parameter.
    """

    shards: Shards | None = None
