"""Pairs of segments with a label: next sentence, and the order of two.

A unit is a run of sentences of one document (see `SentencePacking`). It is split in two at a random
sentence boundary, or in its middle if it has no boundary inside. The packing then gives it a label.
A sentence longer than half a sequence is split into parts. So a unit of segment_pair or sop has two
sentences or parts, unless its document has only one.

Units are coupled within a pool of two or three blocks of a shard (see `EpochOrder.pool`). If the
partner of a unit is of the same document, a unit of another document lends its second segment. A
pool with a single document has no negatives.

Every unit is exactly one sample in every epoch, whatever the draws. Couples depend on lengths and
documents but not on tokens, so the index alone determines the pairs of a pool.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from data_pipeline.hashing import PairDraw, array_keys
from data_pipeline.packing import sequences
from data_pipeline.packing.sequences import PackingRules, Pieces, SentencePacking, Units
from data_pipeline.shards.blocks import Block

# Units are sorted by the length of their second segments, and partners are found among this many
# neighbours. A larger bucket couples more units of different blocks, and truncates more text.
BUCKET = 16


@dataclass(frozen=True)
class PairSpans:
    """The two segments of each pair of a pool, as spans of its stream: [pairs] each."""

    first_starts: NDArray[np.int64]
    first_lengths: NDArray[np.int64]
    second_starts: NDArray[np.int64]
    second_lengths: NDArray[np.int64]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Pool:
    """Blocks whose units are coupled with each other. Only their boundaries are read.

    `first_documents` is the number of each block's first document, ascending. A document that
    continues in another block of the pool has the same number there.
    """

    blocks: Sequence[Block]
    first_documents: Sequence[int]


class PairPacking(SentencePacking):
    """A packing of pairs, whose units are split in two and labelled."""

    version: ClassVar[int] = 2

    @abstractmethod
    def label(self, pairs: PairSpans, documents: NDArray[np.int64], key: int) -> PairSpans:
        """The labelled pairs of an epoch's `key`; `documents` [pairs] are those of the units.

        Which pair a unit becomes may depend on lengths and documents, but not on tokens.
        """


def pair_spans(pool: Pool, rules: PackingRules, key: int) -> PairSpans:
    """The pairs of a pool in the epoch that `key` is derived from, block after block.

    Offsets count in the concatenated streams of its blocks.
    """
    packing = rules.packing
    assert isinstance(packing, PairPacking)
    cut, runs = _joined(pool, packing, rules)
    pairs = _truncate(_split(cut, runs, key), rules.capacity)
    return packing.label(pairs, cut.documents[runs.first], key)


def _joined(pool: Pool, packing: PairPacking, rules: PackingRules) -> tuple[Pieces, Units]:
    """The concatenated pieces and units of all blocks."""
    parts = [packing.pieces(block, rules) for block in pool.blocks]
    runs = [
        packing.units(part, rules, sequences.short_key(block))
        for part, block in zip(parts, pool.blocks, strict=True)
    ]
    tokens = [len(block.tokens) + len(block.documents) for block in pool.blocks]
    token, piece = (np.cumsum([0, *sizes]) for sizes in (tokens, [len(p.starts) for p in parts]))
    cut = Pieces(
        _end_to_end([part.starts for part in parts], token),
        _end_to_end([part.ends for part in parts], token),
        _end_to_end([part.documents for part in parts], pool.first_documents),
        np.concatenate([part.begins for part in parts]),
    )
    first = _end_to_end([run.first for run in runs], piece)
    return cut, Units(first, _end_to_end([run.last for run in runs], piece))


def _end_to_end(parts: Sequence[NDArray[np.int64]], offsets: Iterable[int]) -> NDArray[np.int64]:
    return np.concatenate([part + offset for part, offset in zip(parts, offsets, strict=False)])


def draw(
    key: int, purpose: PairDraw, size: int, below: NDArray[np.int64] | int
) -> NDArray[np.int64]:
    """A random integer in [0, below) for each of `size` units."""
    numbers = np.arange(size)
    words = (array_keys(key, np.full(size, purpose), numbers) >> np.uint64(32)).astype(np.int64)
    return (words * below) >> 32


def _split(cut: Pieces, runs: Units, key: int) -> PairSpans:
    """Split each unit in two, at a random sentence that begins inside it, or in its middle."""
    begins = np.flatnonzero(cut.begins)
    first = np.searchsorted(begins, runs.first, side="right")
    count = np.searchsorted(begins, runs.last) - first
    nth = first + draw(key, PairDraw.SPLIT, len(first), np.maximum(count, 1))
    start, end = cut.starts[runs.first], cut.ends[runs.last - 1]
    at_sentence = cut.starts[begins[np.minimum(nth, len(begins) - 1)]]
    middle = np.where(count > 0, at_sentence, (start + end) // 2)
    return PairSpans(start, middle - start, middle, end - middle, np.zeros_like(start))


def _truncate(pairs: PairSpans, capacity: int) -> PairSpans:
    """Truncate pairs that are too long at their outer ends, the longer segment first."""
    first, second = pairs.first_lengths, pairs.second_lengths
    excess = np.maximum(first + second - capacity, 0)
    from_longer = np.minimum(excess, np.abs(first - second))
    from_first = np.where(first > second, from_longer, 0) + (excess - from_longer + 1) // 2
    return replace(
        pairs,
        first_starts=pairs.first_starts + from_first,
        first_lengths=first - from_first,
        second_lengths=second - (excess - from_first),
    )


def partners_of(by_length: NDArray[np.int64], documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """A partner for each unit, from its bucket; partners are mutual.

    A bucket is sorted by document, and its first half is coupled with its second. So partners are
    of different documents, unless one document has more than half of the bucket. Mostly they are of
    different blocks too. In a bucket with an odd number of units the last is its own partner.
    """
    size = len(by_length)
    places = np.arange(size)
    begin = places - places % BUCKET
    order = by_length[np.lexsort((documents[by_length], begin))]
    half = np.minimum(BUCKET, size - begin) // 2
    within = places - begin
    other = np.where(within < half, places + half, places - half)
    partners = np.empty_like(order)
    partners[order] = order[np.where(within < 2 * half, other, places)]
    return partners


def donors_of(
    partners: NDArray[np.int64], by_length: NDArray[np.int64], documents: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The unit that each unit's negative comes from: its partner, if that is of another document.

    Otherwise it is the unit of another document that is next in length; in a pool with a single
    document, the unit itself.
    """
    sorted_documents = documents[by_length]
    changes = np.flatnonzero(np.diff(sorted_documents)) + 1  # where a run of one document ends
    if not len(changes):
        return np.arange(len(documents))
    lonely = documents[partners] == documents
    places = np.flatnonzero(lonely[by_length])
    run = np.searchsorted(changes, places, side="right")
    before = changes[np.maximum(run - 1, 0)] - 1
    after = changes[np.minimum(run, len(changes) - 1)]
    take_after = (run == 0) | ((run < len(changes)) & (after - places < places - before))
    donors = partners.copy()
    donors[by_length[places]] = by_length[np.where(take_after, after, before)]
    return donors


class NextSegment(PairPacking):
    """A unit is coupled with a unit of another document whose second segment is about as long.

    The longer of the two second segments is truncated to the length of the other. A draw decides
    whether the couple exchanges second segments. The truncation does not depend on the draw, so
    lengths say nothing about labels. (In BERT's create_pretraining_data they do.)
    """

    pair_labels = ("next", "from another document")

    def label(self, pairs: PairSpans, documents: NDArray[np.int64], key: int) -> PairSpans:
        numbers = np.arange(len(documents))
        tie = array_keys(key, np.full(len(numbers), PairDraw.TIE_BREAK), numbers)
        by_length = np.lexsort((tie, pairs.second_lengths))
        partners = partners_of(by_length, documents)
        chosen = draw(key, PairDraw.LABEL, len(numbers), 2)[np.minimum(numbers, partners)] == 1
        donors = donors_of(partners, by_length, documents)
        chosen &= donors != numbers
        return replace(
            pairs,
            second_starts=np.where(chosen, pairs.second_starts[donors], pairs.second_starts),
            second_lengths=np.minimum(pairs.second_lengths, pairs.second_lengths[donors]),
            labels=chosen.astype(np.int64),
        )


@sequences.register_packing
class SegmentPair(NextSegment):
    """Runs of sentences; the second one follows the first, or is from another document."""

    name = "segment_pair"
    needs_boundary = True

    def ends(self, cut: Pieces, rules: PackingRules, key: int) -> NDArray[np.int64]:
        return np.minimum(sequences.until_full(cut, rules, key, least=2), cut.document_ends)


@sequences.register_packing
class SentencePair(NextSegment):
    """Two sentences; the second one follows the first, or is from another document."""

    name = "sentence_pair"
    draws_lengths = False

    def ends(self, cut: Pieces, rules: PackingRules, key: int) -> NDArray[np.int64]:
        """A document's last piece joins the two before it rather than stay alone."""
        numbers = np.arange(len(cut.starts))
        last = numbers + np.where(cut.document_ends - numbers == 3, 3, 2)
        return np.minimum(last, cut.document_ends)


@sequences.register_packing
class SentenceOrder(PairPacking):
    """Runs of sentences of one document, in order or, half of them, swapped."""

    name = "sop"
    pair_labels = ("in order", "swapped")
    needs_boundary = True
    ends = SegmentPair.ends

    def label(self, pairs: PairSpans, documents: NDArray[np.int64], key: int) -> PairSpans:
        chosen = draw(key, PairDraw.LABEL, len(documents), 2) == 1
        return PairSpans(
            np.where(chosen, pairs.second_starts, pairs.first_starts),
            np.where(chosen, pairs.second_lengths, pairs.first_lengths),
            np.where(chosen, pairs.first_starts, pairs.second_starts),
            np.where(chosen, pairs.first_lengths, pairs.second_lengths),
            chosen.astype(np.int64),
        )
