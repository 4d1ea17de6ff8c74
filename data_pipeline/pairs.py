"""Pairs of segments with a label: next-sentence prediction and sentence order.

A unit (a run of sentences of one document, see `packing.units`) is split in two at a random
sentence boundary; a unit of one sentence is split in its middle. Then

- segment_pair, sentence_pair: half of the units exchange their second segments among each other,
  always between different documents. Label 0: the second segment follows the first; 1: it comes
  from another document. A document that holds more than half of a block borrows copies instead.
  Documents are exchanged within their block, and a block of one document has no negatives: text
  for pairs is best kept in blocks of the usual size, which hold hundreds of documents.
- sop: half of the pairs are swapped. Label 0: in order; 1: swapped. There are no negatives from
  other documents.

Every unit is exactly one sample in every epoch, whatever the draws. Pairs that became too long by
an exchange are cut at the longer segment, at a random end, as in BERT's create_pretraining_data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from data_pipeline.hashing import array_keys
from data_pipeline.packing import PackingRules, Pieces, Units, pieces, short_key, units
from data_pipeline.shards import Block

SPLIT, LABEL, GROUP, MEMBER, DONOR, CUT_FIRST, CUT_SECOND = range(31, 38)


@dataclass(frozen=True)
class PairSpans:
    """The two segments of each sequence of a block, in its stream: [sequences] each."""

    first_starts: NDArray[np.int64]
    first_lengths: NDArray[np.int64]
    second_starts: NDArray[np.int64]
    second_lengths: NDArray[np.int64]
    labels: NDArray[np.int64]


def pair_spans(block: Block, rules: PackingRules, key: int) -> PairSpans:
    """The pairs that a block makes in the epoch that `key` stands for, in reading order."""
    cut = pieces(block, rules.capacity)
    runs = units(cut, rules, short_key(block))
    pairs = _split(cut, runs, key)
    positive = _draw(key, LABEL, len(runs.first), 2) == 0
    if rules.kind == "sop":
        pairs = _swap(pairs, ~positive)
    else:
        pairs = _exchange(pairs, ~positive, cut.documents[runs.first], key)
    return _fit(pairs, rules.capacity, key)


def _draw(key: int, purpose: int, size: int, below: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """A random integer in [0, below) for each of `size` units."""
    numbers = np.arange(size)
    words = (array_keys(key, np.full(size, purpose), numbers) >> np.uint64(32)).astype(np.int64)
    return (words * below) >> 32


def _split(cut: Pieces, runs: Units, key: int) -> PairSpans:
    """Cut each unit in two, at a random boundary between its pieces."""
    sizes = runs.last - runs.first
    boundary = runs.first + 1 + _draw(key, SPLIT, len(sizes), np.maximum(sizes - 1, 1))
    start, end = cut.starts[runs.first], cut.ends[runs.last - 1]
    at_boundary = cut.starts[np.minimum(boundary, len(cut.starts) - 1)]
    middle = np.where(sizes > 1, at_boundary, (start + end) // 2)
    return PairSpans(start, middle - start, middle, end - middle, np.zeros_like(start))


def _swap(pairs: PairSpans, chosen: NDArray[np.bool_]) -> PairSpans:
    return PairSpans(
        np.where(chosen, pairs.second_starts, pairs.first_starts),
        np.where(chosen, pairs.second_lengths, pairs.first_lengths),
        np.where(chosen, pairs.first_starts, pairs.second_starts),
        np.where(chosen, pairs.first_lengths, pairs.second_lengths),
        chosen.astype(np.int64),
    )


def _exchange(
    pairs: PairSpans, chosen: NDArray[np.bool_], documents: NDArray[np.int64], key: int
) -> PairSpans:
    """Give each chosen unit the second segment of a unit of another document."""
    donors = np.arange(len(documents))
    members = np.flatnonzero(chosen)
    if len(members):
        donors[members] = _partners(members, documents, key)
    donors = _borrow(donors, chosen, documents, key)
    return replace(
        pairs,
        second_starts=pairs.second_starts[donors],
        second_lengths=pairs.second_lengths[donors],
        labels=(documents[donors] != documents).astype(np.int64),
    )


def _partners(
    members: NDArray[np.int64], documents: NDArray[np.int64], key: int
) -> NDArray[np.int64]:
    """A partner for each member: a permutation that keeps nobody in its own document.

    With the members sorted by document, a shift by the size of the largest group leaves every
    group, unless one holds more than half of all.
    """
    groups = documents[members]
    shuffled_groups = array_keys(key, np.full(len(members), GROUP), groups)
    shuffled_members = array_keys(key, np.full(len(members), MEMBER), members)
    order = np.lexsort((shuffled_members, groups, shuffled_groups))
    largest = int(np.bincount(groups).max())
    partners = np.empty_like(members)
    partners[order] = members[np.roll(order, -largest)]
    return partners


def _borrow(
    donors: NDArray[np.int64],
    chosen: NDArray[np.bool_],
    documents: NDArray[np.int64],
    key: int,
) -> NDArray[np.int64]:
    """Where the exchange stayed inside a document, copy from a random unit of another one."""
    size = len(documents)
    first = np.searchsorted(documents, documents, side="left")
    own = np.searchsorted(documents, documents, side="right") - first
    others = _draw(key, DONOR, size, np.maximum(size - own, 1))
    others = np.where(others >= first, others + own, others)
    lonely = chosen & (documents[donors] == documents) & (own < size)
    donors = np.where(lonely, np.minimum(others, size - 1), donors)
    # In a block of one document nobody can be given a stranger's segment: keep one's own.
    return np.where(documents[donors] == documents, np.arange(size), donors)


def _fit(pairs: PairSpans, capacity: int, key: int) -> PairSpans:
    """Cut pairs of more than `capacity` tokens, the longer segment first, then both alike."""
    first, second = pairs.first_lengths, pairs.second_lengths
    excess = np.maximum(first + second - capacity, 0)
    from_longer = np.minimum(excess, np.abs(first - second))
    from_first = np.where(first > second, from_longer, 0) + (excess - from_longer + 1) // 2
    from_second = excess - from_first
    drop_first = _draw(key, CUT_FIRST, len(first), from_first + 1)
    drop_second = _draw(key, CUT_SECOND, len(first), from_second + 1)
    return PairSpans(
        pairs.first_starts + drop_first,
        first - from_first,
        pairs.second_starts + drop_second,
        second - from_second,
        pairs.labels,
    )
