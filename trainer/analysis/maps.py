"""The patterns of attention maps (Kovaleva et al., 2019, arXiv 1908.08593), of all heads.

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

Attention is made again from the captured queries and keys, a block at a time; no map is kept.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from model import Capture, Model
from trainer.batches import MicroBatch
from trainer.learners.module import features_of
from trainer.objectives.terms.attention import attention_blocks

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


SHOWN = 24  # tokens of an example whose maps are shown


@dataclass(frozen=True)
class HeadPatterns:
    """The patterns of attention of every layer's heads.

    shares: float64 [layers, heads, patterns], the fraction of the sequences in which a head's map
        has each of `PATTERNS`. excess: float64 [layers, heads, sets], the mean excess of each of
        `KEY_SETS`. sequences: how many there were.
    """

    shares: Tensor
    excess: Tensor
    sequences: int


@torch.no_grad()
def head_patterns(model: Model, batches: Iterable[MicroBatch], delimiters: Tensor) -> HeadPatterns:
    """The patterns of a model with attention; `delimiters` bool [V] says which tokens are such."""
    config = model.config
    shares = torch.zeros(config.layers, config.heads, len(PATTERNS), dtype=torch.float64)
    sums = torch.zeros(config.layers, config.heads, len(KEY_SETS), dtype=torch.float64)
    sequences = 0
    for batch in batches:
        sequences += len(batch.input_ids)
        for number, q, k in attention_of_layers(model, batch):
            excesses = map_excess(q, k, batch, delimiters, config.window(number))  # [sets, B, A]
            told = F.one_hot(classify(excesses), len(PATTERNS))  # [B, A, patterns]
            shares[number - 1] += told.sum(dim=0).cpu()
            sums[number - 1] += excesses.sum(dim=1).t().cpu()
    return HeadPatterns(shares / sequences, sums / sequences, sequences)


@dataclass(frozen=True)
class ExampleMaps:
    """The maps of one example: weights float32 [layers, heads, L, L], of its first tokens."""

    tokens: Sequence[str]
    weights: Tensor


@torch.no_grad()
def example_maps(model: Model, batch: MicroBatch, name: Callable[[int], str]) -> ExampleMaps:
    """The maps of the example in `batch` that fits best; `name` gives the name of a token id."""
    lengths = batch.attention_mask.sum(dim=1)
    row = int((lengths - SHOWN).abs().argmin())
    length = min(SHOWN, int(lengths[row]))
    layers = [maps[row, :, :length, :length].float().cpu() for maps in maps_of_layers(model, batch)]
    tokens = [name(token) for token in batch.input_ids[row, :length].tolist()]
    return ExampleMaps(tokens, torch.stack(layers))


def attention_of_layers(model: Model, batch: MicroBatch) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The number of each layer, from 1, and its queries and keys [B, A, L, D]."""
    numbers = tuple(range(1, model.config.layers + 1))
    capture = Capture(attention=numbers, last_hidden_state=True)
    attention = features_of(model, batch, capture).attention
    for number in numbers:
        queries, keys, _ = attention.pop(number)
        yield number, queries, keys


def maps_of_layers(model: Model, batch: MicroBatch) -> Iterator[Tensor]:
    """The whole maps of each layer, [B, A, L, L]; rows of padding are 0."""
    for number, queries, keys in attention_of_layers(model, batch):
        rows, heads, length, _ = queries.shape
        maps = torch.zeros(rows, heads, length, length, device=queries.device)
        blocks = (queries, keys, batch.attention_mask, model.config.window(number))
        for some, span, weights, pairs in attention_blocks(*blocks):
            maps[some, :, span] = weights * pairs[:, None]
        yield maps


def map_excess(
    queries: Tensor, keys: Tensor, batch: MicroBatch, delimiters: Tensor, window: int
) -> Tensor:
    """The excess of each set of keys in the maps of a layer: float64 [sets, B, A].

    queries, keys: [B, A, L, D].
    """
    mask, (rows_in_all, heads) = batch.attention_mask, queries.shape[:2]
    mass = queries.new_zeros(len(KEY_SETS), rows_in_all, heads, dtype=torch.float64)
    uniform = mass.new_zeros(len(KEY_SETS), rows_in_all, 1)
    is_delimiter = delimiters[batch.input_ids]
    for rows, span, weights, pairs in attention_blocks(queries, keys, mask, window):
        sets = key_sets(is_delimiter[rows], batch.segment_ids[rows], pairs, span)
        mass[:, rows] += masses(weights, sets)
        uniform[:, rows] += uniform_masses(sets, pairs)
    tokens = mask.sum(dim=1)[:, None]
    return excess(mass / tokens, uniform / tokens)
