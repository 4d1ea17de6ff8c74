"""A linear-chain conditional random field (Lafferty et al., 2001) over the tags of a text.

The score of a sequence of tags is the sum of its emissions (the logits of a tagging head), of a
weight for each pair of neighbouring tags, and of weights for its first and its last tag. The chain
runs over the positions where a mask is true: those between them (further pieces of a word) are
passed over. Shapes: B texts, L positions, K tags.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Transitions(NamedTuple):
    """The weights: between [K, K], from the row's tag to the column's; first [K]; last [K]."""

    between: Tensor
    first: Tensor
    last: Tensor


class ConditionalRandomField(nn.Module):
    """The parameters. All are zero at first: each tag is then chosen for itself."""

    def __init__(self, tags: int) -> None:
        super().__init__()
        self.between = nn.Parameter(torch.zeros(tags, tags))
        self.first = nn.Parameter(torch.zeros(tags))
        self.last = nn.Parameter(torch.zeros(tags))

    def forward(self) -> Transitions:
        """Copies, in the graph: ZeRO-3 takes the parameters back when this returns."""
        return Transitions(self.between.clone(), self.first.clone(), self.last.clone())


def log_likelihood(
    emissions: Tensor, transitions: Transitions, tags: Tensor, mask: Tensor
) -> Tensor:
    """The log-probability of the tags of each text, float32 [B]; 0 for a text without any.

    emissions [B, L, K]; tags int64 [B, L], read where the bool `mask` [B, L] is true.
    """
    order, real = _in_front(mask)
    steps = _along(emissions, order)
    chosen = tags.gather(1, order).masked_fill(~real, 0)
    weights = Transitions(*(weight.float() for weight in transitions))
    return _score(steps, weights, chosen, real) - _log_partition(steps, weights, real)


def decode(emissions: Tensor, transitions: Transitions, mask: Tensor) -> Tensor:
    """The best tags of each text (Viterbi), int64 [B, L], and -1 where the mask is false."""
    order, real = _in_front(mask)
    steps = _along(emissions, order)
    weights = Transitions(*(weight.float() for weight in transitions))
    best = _viterbi(steps, weights, real)
    return torch.empty_like(order).scatter(1, order, best.masked_fill(~real, -1))


def _in_front(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in an order that has those of the chain first, and which they are: [B, L] each.

    The shapes depend on no values, so that a GPU need not wait for them.
    """
    order = (~mask).byte().argsort(dim=1, stable=True)
    places = torch.arange(mask.shape[1], device=mask.device)
    return order, places < mask.sum(dim=1, keepdim=True)


def _along(emissions: Tensor, order: Tensor) -> Tensor:
    tags = emissions.shape[-1]
    return emissions.float().gather(1, order[..., None].expand(-1, -1, tags))


def _score(steps: Tensor, weights: Transitions, tags: Tensor, real: Tensor) -> Tensor:
    """The score of these tags [B]."""
    emitted = steps.gather(2, tags[..., None]).squeeze(2).masked_fill(~real, 0.0).sum(dim=1)
    moves = weights.between[tags[:, :-1], tags[:, 1:]].masked_fill(~real[:, 1:], 0.0).sum(dim=1)
    final = tags.gather(1, (real.sum(dim=1, keepdim=True) - 1).clamp(min=0)).squeeze(1)
    ends = weights.first[tags[:, 0]] + weights.last[final]
    return emitted + moves + ends.masked_fill(~real[:, 0], 0.0)


def _log_partition(steps: Tensor, weights: Transitions, real: Tensor) -> Tensor:
    """The log of the sum over all sequences of tags, by the forward algorithm: [B]."""
    scores = weights.first + steps[:, 0]
    for place in range(1, steps.shape[1]):
        arriving = scores[:, :, None] + weights.between
        further = torch.logsumexp(arriving, dim=1) + steps[:, place]
        scores = torch.where(real[:, place, None], further, scores)
    total = torch.logsumexp(scores + weights.last, dim=1)
    return total.masked_fill(~real[:, 0], 0.0)


def _viterbi(steps: Tensor, weights: Transitions, real: Tensor) -> Tensor:
    """The tags with the highest score, int64 [B, places], without meaning beyond a chain's end."""
    scores, origins = weights.first + steps[:, 0], []
    for place in range(1, steps.shape[1]):
        best, origin = (scores[:, :, None] + weights.between).max(dim=1)
        scores = torch.where(real[:, place, None], best + steps[:, place], scores)
        origins.append(origin)
    tag = (scores + weights.last).argmax(dim=1)
    path = [tag]
    for place in range(len(origins), 0, -1):
        before = origins[place - 1].gather(1, tag[:, None]).squeeze(1)
        tag = torch.where(real[:, place], before, tag)
        path.append(tag)
    return torch.stack(path[::-1], dim=1)
