"""The real tokens of padded rows as one row, for what a layer computes at each position alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.documents import AttentionMask, Padded

# The largest part of the positions that may be tokens for leaving out the others to pay, as
# measured with benchmarks/model_attention.py on a CPU.
MOST_TOKENS = 0.95


class RealTokens(NamedTuple):
    """The tokens of `rows` rows of `length` positions, without the padding that follows them.

    positions: int64 [T], the tokens' flat positions in B * L, ascending.
    """

    positions: Tensor
    rows: int
    length: int

    @classmethod
    def where_it_pays(cls, mask: AttentionMask | Padded | None, x: Tensor) -> RealTokens | None:
        """The tokens of states x [B, L, H], if layers run faster on these alone.

        The mask must be `Padded`, since the host has to know how many tokens there are.
        """
        rows, length, _ = x.shape
        if not isinstance(mask, Padded) or not 0 < mask.tokens <= MOST_TOKENS * rows * length:
            return None
        real = torch.arange(length, device=x.device) < mask.lengths[:, None]
        numbers = torch.arange(1, mask.tokens + 1, device=x.device)
        # Unlike `nonzero`, `searchsorted` does not make the host wait for the number of tokens.
        return cls(torch.searchsorted(real.flatten().cumsum(0), numbers), rows, length)

    def unpad(self, x: Tensor) -> Tensor:
        """[1, T, H] of x [B, L, H]."""
        return _Unpadding.apply(x, self.positions)

    def pad(self, x: Tensor) -> Tensor:
        """[B, L, H] of x [1, T, H]; 0 at padding."""
        return _padded(x, self.positions, self.rows, self.length)

    def places(self, positions: Tensor) -> Tensor:
        """The places in T of flat positions in B * L, int64 [P]; of padding any."""
        return torch.searchsorted(self.positions, positions).clamp(max=len(self.positions) - 1)

    def share_code(self, x: Tensor) -> None:
        """Let one compilation of what reads x [1, T, H] and these tokens serve every T."""
        from torch._dynamo import maybe_mark_dynamic  # a second, and only for compiled layers

        maybe_mark_dynamic(x, 1)
        maybe_mark_dynamic(self.positions, 0)


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
    zeros = x.new_zeros(rows * length, x.shape[-1])
    return zeros.index_copy(0, positions, x[0]).view(rows, length, -1)
