"""Rows that end in padding or hold several documents, and their real tokens as one row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from model.precision import kernel_device


class Documents(NamedTuple):
    """The documents of rows [B, L], in place of an attention mask: each attends to itself only.

    The B * L positions are cut into runs: documents, and the padding of rows. So no output is
    undefined, and a run needs no mask.

    boundaries: int32 [N + 1], the offsets of the runs. N is a power of two, so that it takes few
        values: the last runs may be empty.
    numbers: int64 [B, L], the run of each position.
    places: int64 [B, L], the place of each position in its run, from 0.
    sizes: the lengths of the runs that are not empty, on the host.
    is_causal: whether a position attends only to itself and to those before it in its run.
    """

    boundaries: Tensor
    numbers: Tensor
    places: Tensor
    sizes: tuple[int, ...]
    is_causal: bool = False

    @classmethod
    def of(cls, numbers: Tensor, is_causal: bool = False) -> Documents:
        """Of the number of each position's document, integers [B, L] on the CPU.

        Neighbours in a row with the same number are in one run. The padding has a number too.
        """
        begins = torch.ones_like(numbers, dtype=torch.bool)
        begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        starts = begins.flatten().nonzero()[:, 0]
        runs, size = len(starts), numbers.numel()
        boundaries = torch.full(((1 << (runs - 1).bit_length()) + 1,), size, dtype=torch.int32)
        boundaries[:runs] = starts
        run = begins.flatten().cumsum(0) - 1
        places = torch.arange(size) - starts[run]
        sizes = tuple(boundaries[: runs + 1].diff().tolist())
        shaped = run.view_as(numbers), places.view_as(numbers)
        return cls(boundaries, *shaped, sizes, is_causal)

    def map(self, change: Callable[[Tensor], Tensor]) -> Documents:
        """These documents with each tensor changed, such as moved to a device."""
        boundaries, numbers, places = map(change, self[:3])
        return self._replace(boundaries=boundaries, numbers=numbers, places=places)

    @property
    def firsts(self) -> Tensor:
        """The flat position of each run's first token, int64 [N]; of an empty run any."""
        return self.boundaries[:-1].long().clamp(max=self.numbers.numel() - 1)

    def first_states(self, states: Tensor) -> Tensor:
        """The state of each run's first token, [N, H] of states [B, L, H]."""
        return states.flatten(0, 1).index_select(0, self.firsts)

    def mean_states(self, states: Tensor) -> Tensor:
        """The mean state of each run, [N, H] of states [B, L, H]; 0 of an empty run."""
        wide = states.to(torch.promote_types(states.dtype, torch.float32)).flatten(0, 1)
        sums = wide.new_zeros(len(self.boundaries) - 1, states.shape[-1])
        sums = sums.index_add(0, self.numbers.flatten(), wide)
        return (sums / self.boundaries.diff().clamp(min=1)[:, None]).to(states.dtype)


class Padded(NamedTuple):
    """Rows [B, L] that end in padding, in place of an attention mask.

    lengths: int64 [B], the number of real tokens, which each row begins with.
    tokens: their sum, on the host.
    """

    lengths: Tensor
    tokens: int


AttentionMask = Tensor | Documents


def without_count(mask: AttentionMask | Padded | None) -> AttentionMask | None:
    """The mask, in the form [B] where it is `Padded`."""
    return mask.lengths if isinstance(mask, Padded) else mask


# The largest part of the positions that may be tokens for leaving out the others to pay: measured
# on a CPU (benchmarks/RESULTS.md), and as kernels are counted for a GPU. There, copying
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
    def where_it_pays(cls, mask: Padded, x: Tensor, copies: bool) -> RealTokens | None:
        """The tokens of states x [B, L, H], if layers run faster on these alone.

        `copies`: attention needs them in their rows.
        """
        rows, length, _ = x.shape
        on_gpu = kernel_device(x.device) != "cpu"
        most = MOST_TOKENS_COPIED_ON_GPU if copies and on_gpu else MOST_TOKENS
        if not 0 < mask.tokens <= most * rows * length:
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
