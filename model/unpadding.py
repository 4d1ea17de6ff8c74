"""The real tokens of padded rows as one row, for what a layer computes at each position alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from model.documents import AttentionMask, Padded
from model.precision import kernel_device

# The largest part of the positions that may be tokens for leaving out the others to pay: measured
# on a CPU with benchmarks/model_attention.py, and as kernels are counted for a GPU. There, copying
# between the tokens and their rows in each layer is dear beside the products that it saves.
MOST_TOKENS = 0.95
MOST_TOKENS_COPIED_ON_GPU = 0.75


class RealTokens(NamedTuple):
    """The tokens of B rows of `length` positions, without the padding that follows them.

    positions: int64 [T], the tokens' flat positions in B * L, ascending.
    lengths: int64 [B], the tokens of each row.
    """

    positions: Tensor
    lengths: Tensor
    length: int

    @classmethod
    def where_it_pays(
        cls, mask: AttentionMask | Padded | None, x: Tensor, copies: bool
    ) -> RealTokens | None:
        """The tokens of states x [B, L, H], if layers run faster on these alone.

        `copies`: attention needs them in their rows. The mask must be `Padded`, since the host has
        to know how many tokens there are.
        """
        rows, length, _ = x.shape
        on_gpu = kernel_device(x.device) != "cpu"
        most = MOST_TOKENS_COPIED_ON_GPU if copies and on_gpu else MOST_TOKENS
        if not isinstance(mask, Padded) or not 0 < mask.tokens <= most * rows * length:
            return None
        real = torch.arange(length, device=x.device) < mask.lengths[:, None]
        numbers = torch.arange(1, mask.tokens + 1, device=x.device)
        # Unlike `nonzero`, `searchsorted` does not make the host wait for the number of tokens.
        positions = torch.searchsorted(real.flatten().cumsum(0), numbers)
        return cls(positions, mask.lengths, length)

    @property
    def columns(self) -> Tensor:
        """The position of each token in its row, int64 [T]."""
        return self.positions % self.length

    @property
    def boundaries(self) -> Tensor:
        """The offsets of the rows in T, int32 [B + 1]."""
        return F.pad(self.lengths.cumsum(0), (1, 0)).int()

    def unpad(self, x: Tensor) -> Tensor:
        """[1, T, H] of x [B, L, H]."""
        return _Unpadding.apply(x, self.positions)

    def pad(self, x: Tensor) -> Tensor:
        """[B, L, ...] of x [1, T, ...]; 0 at padding."""
        return _padded(x, self.positions, len(self.lengths), self.length)

    def places(self, positions: Tensor) -> Tensor:
        """The places in T of flat positions in B * L, int64 [P]; of padding any."""
        return torch.searchsorted(self.positions, positions).clamp(max=len(self.positions) - 1)

    def share_code(self, *tensors: Tensor | None) -> None:
        """Let one compilation of what reads these tokens and tensors [n, T, m] serve every T."""
        from torch._dynamo import maybe_mark_dynamic  # a second, and only for compiled layers

        maybe_mark_dynamic(self.positions, 0)
        for tensor in tensors:
            if tensor is not None and tensor.shape[1] == len(self.positions):
                maybe_mark_dynamic(tensor, 1)


class _Unpadding(torch.autograd.Function):
    """A selection of positions, whose gradient is copied to them.

    That of ``index_select`` is added, for positions that come twice: on GPUs slower, and in no
    fixed order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.rows, ctx.length, _ = x.shape
        return x.flatten(0, 1).index_select(0, positions)[None]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (gradient,), (positions,) = upstream, ctx.saved_tensors
        return _padded(gradient, positions, ctx.rows, ctx.length), None


def _padded(x: Tensor, positions: Tensor, rows: int, length: int) -> Tensor:
    zeros = x.new_zeros(rows * length, *x.shape[2:])
    return zeros.index_copy(0, positions, x[0]).unflatten(0, (rows, length))
