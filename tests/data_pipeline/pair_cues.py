"""How well a rule about lengths, learned on some pairs, tells the labels of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline import CorpusSplit
from data_pipeline.hashing import scalar_key
from data_pipeline.order import EpochOrder
from data_pipeline.packing.kinds.pairs import PairSpans, Pool, pair_spans
from data_pipeline.packing.sequences import PackingRules

BINS = 20
Labelled = tuple[NDArray[Any], NDArray[Any]]  # [pairs, 2] tokens in all, of the first; [pairs]


def accuracy(fit: Labelled, held_out: Labelled) -> float:
    """How many of the held-out labels a table of two cues, learned on `fit`, tells; 0.5 is none.

    The table has a cell for each pair of `BINS` quantiles; both labels weigh the same.
    """
    edges = np.quantile(fit[0], np.linspace(0, 1, BINS + 1)[1:-1], axis=0)

    def cell(cues: NDArray[Any]) -> NDArray[np.int64]:
        rows, columns = (np.searchsorted(edges[:, n], cues[:, n], side="right") for n in (0, 1))
        return rows * BINS + columns

    shares = [
        np.bincount(cell(fit[0][fit[1] == label]), minlength=BINS**2) / (fit[1] == label).sum()
        for label in (0, 1)
    ]
    told = (shares[1] > shares[0])[cell(held_out[0])] == held_out[1]
    return float(np.mean([told[held_out[1] == label].mean() for label in (0, 1)]))


def repeat(epoch: Callable[[int], Labelled], least: int) -> Labelled:
    """Epochs joined until there are enough pairs."""
    parts = [epoch(0)]
    while sum(len(labels) for _, labels in parts) < least:
        parts.append(epoch(len(parts)))
    cues, labels = zip(*parts, strict=True)
    return np.concatenate(cues), np.concatenate(labels)


def of_epoch(split: CorpusSplit, rules: PackingRules, epoch: int) -> Labelled:
    """The lengths and labels of the pairs of an epoch."""
    return lengths([pairs for _, pairs in pools(split, rules, epoch)])


def lengths(parts: Sequence[PairSpans]) -> Labelled:
    """The lengths and labels of pairs."""
    first, second, labels = (
        np.concatenate([getattr(pairs, name) for pairs in parts])
        for name in ("first_lengths", "second_lengths", "labels")
    )
    return np.stack([first + second, first], 1), labels


def pools(
    split: CorpusSplit, rules: PackingRules, epoch: int
) -> Iterator[tuple[list[int], PairSpans]]:
    """The blocks and the pairs of each pool of an epoch."""
    order = EpochOrder(split.sequence_counts(rules), 1, epoch)
    for blocks in sorted({tuple(order.pool(block)) for block in range(len(split.index.blocks))}):
        bounds = [next(split.index.boundaries(number, number + 1)) for number in blocks]
        pool = Pool(bounds, [*map(split.index.first_document, blocks)])
        yield list(blocks), pair_spans(pool, rules, scalar_key(1, epoch, blocks[0]))
