"""L2 norms without a host sync, as precise on a CPU as on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Elements that are summed in float32. A CPU adds up one after the other, and of BERT's embedding
# the norm would be 0.2% off; in pieces of this size it is 1e-6.
PIECE = 2**18


def squared_norm(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The squared L2 norm of all `tensors`, float32, as if one: float64 [] on `device`."""
    pieces = [piece for tensor in tensors for piece in tensor.reshape(-1).split(PIECE)]
    if not pieces:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(pieces)).double().square().sum()
