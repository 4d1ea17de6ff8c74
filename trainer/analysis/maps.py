"""The patterns of all heads of a model, over many sequences.

Attention is made again from the captured queries and keys, a block at a time; no map is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from model import Capture, Model
from trainer.analysis.patterns import (
    KEY_SETS,
    PATTERNS,
    classify,
    excess,
    key_sets,
    masses,
    uniform_masses,
)
from trainer.batches import MicroBatch
from trainer.learners.programs import features_of
from trainer.objectives.terms.attention import attention_blocks

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
    numbers = tuple(range(1, config.layers + 1))
    capture = Capture(attention=numbers, last_hidden_state=True)
    sequences = 0
    for batch in batches:
        sequences += len(batch.input_ids)
        attention = features_of(model, batch, capture).attention
        for number in numbers:
            q, k, _ = attention.pop(number)
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
    config = model.config
    lengths = batch.attention_mask.sum(dim=1)
    row = int((lengths - SHOWN).abs().argmin())
    length = min(SHOWN, int(lengths[row]))
    numbers = tuple(range(1, config.layers + 1))
    attention = features_of(
        model, batch, Capture(attention=numbers, last_hidden_state=True)
    ).attention
    layers = []
    for number in numbers:
        queries, keys, _ = attention.pop(number)
        maps = whole_maps(queries, keys, batch, config.window(number))
        layers.append(maps[row, :, :length, :length].float().cpu())
    tokens = [name(token) for token in batch.input_ids[row, :length].tolist()]
    return ExampleMaps(tokens, torch.stack(layers))


def whole_maps(queries: Tensor, keys: Tensor, batch: MicroBatch, window: int) -> Tensor:
    """The whole maps of a layer, [B, A, L, L]; rows of padding are 0."""
    rows, heads, length, _ = queries.shape
    maps = torch.zeros(rows, heads, length, length, device=queries.device)
    for some, span, weights, pairs in attention_blocks(queries, keys, batch.attention_mask, window):
        maps[some, :, span] = weights * pairs[:, None]
    return maps


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
