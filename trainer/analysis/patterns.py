"""Which pattern an attention map has: the five of Kovaleva et al. (2019, arXiv 1908.08593).

They named maps by eye, and trained a classifier on the names. Here a rule of numbers does it. Four
sets of keys are of interest, for each query:

- vertical: delimiters, which are [CLS], [SEP] and punctuation;
- diagonal: the query itself and its neighbours on either side;
- either: what is in one of these two, or in both;
- block: the query's own segment.

The *mass* of a set is the attention that falls on it, the mean over the queries of a map. What of
it means anything depends on the set's size: of ten tokens three are near every query. The *excess*
of a set is therefore its mass over that of uniform attention, as a fraction of the most that it
can be: (mass - uniform) / (1 - uniform). It is 0 for uniform attention and 1 where all is on the
set. A set that holds every visible key has an excess of 0. A map is then

1. where the excess of *either* is at least 1/2: vertical+diagonal if the smaller excess of the two
   is at least half of the larger, otherwise vertical or diagonal, after the larger;
2. else block, where the excess of block is at least 1/2;
3. else heterogeneous.
"""

from __future__ import annotations

import torch
from torch import Tensor

PATTERNS = ("vertical", "diagonal", "vertical+diagonal", "block", "heterogeneous")
KEY_SETS = ("vertical", "diagonal", "either", "block")
LEAST_EXCESS = 0.5
LEAST_BALANCE = 0.5  # of the smaller excess to the larger, in a map with both
NEAR = 1  # positions on either side


def key_sets(delimiters: Tensor, segments: Tensor, pairs: Tensor, queries: slice) -> Tensor:
    """Which visible keys are in each of `KEY_SETS`: bool [4, B, l, L].

    delimiters: bool [B, L]; segments: int64 [B, L]; pairs: bool [B, l, L], where the queries of a
    block, `queries` of the L positions, attend to a key.
    """
    position = torch.arange(delimiters.shape[1], device=delimiters.device)
    near = (position[queries, None] - position).abs() <= NEAR
    vertical = delimiters[:, None, :].expand_as(pairs)
    same_segment = segments[:, queries, None] == segments[:, None, :]
    return torch.stack([vertical, near.expand_as(pairs), vertical | near, same_segment]) & pairs


def masses(weights: Tensor, sets: Tensor) -> Tensor:
    """The attention on each set, summed over queries: float64 [4, B, A].

    weights: [B, A, l, L], rows that sum to 1; sets: bool [4, B, l, L].
    """
    return torch.einsum("baqk,sbqk->sbaq", weights, sets.to(weights.dtype)).double().sum(dim=-1)


def uniform_masses(sets: Tensor, pairs: Tensor) -> Tensor:
    """The attention on each set if it is uniform over the visible keys, [4, B, 1]."""
    visible = pairs.sum(dim=-1).clamp(min=1)
    return (sets.sum(dim=-1).double() / visible).sum(dim=-1, keepdim=True)


def excess(mass: Tensor, uniform: Tensor) -> Tensor:
    """The mass of each set less that of uniform attention; both are means, [4, ...]."""
    room = 1.0 - uniform
    return torch.where(room > 0, (mass - uniform) / room.where(room > 0, 1.0), 0.0)


def classify(excesses: Tensor) -> Tensor:
    """The number in `PATTERNS` of maps with these excesses, [4, ...]: int64 [...]."""
    vertical, diagonal, either, block = excesses
    larger, smaller = torch.maximum(vertical, diagonal), torch.minimum(vertical, diagonal)
    number = torch.where(block >= LEAST_EXCESS, 3, 4)
    stronger = torch.where(vertical >= diagonal, 0, 1)
    first = torch.where(smaller >= LEAST_BALANCE * larger, 2, stronger)
    return torch.where(either >= LEAST_EXCESS, first, number)
