"""Rows that end in padding, or hold several documents: which positions attend to each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


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
