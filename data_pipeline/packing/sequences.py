"""Packing: how the sentences of one block become sequences of at most L tokens.

Each block is packed by itself, so the number of sequences of a corpus is a sum over its blocks. It
does not depend on the seed; only the pairing of segments changes from epoch to epoch. Everything is
computed for a whole block at once, from its boundaries.

The block becomes a stream in which a separator follows each document. A sequence is
``[CLS] first [SEP]`` or ``[CLS] first [SEP] second [SEP]``, where first and second are segments of
the stream. If a segment ends with its document, the sequence's own [SEP] replaces the separator.
RoBERTa (arXiv 1907.11692, section 4.2) defines the packings, ALBERT (1909.11942) sentence order.

- full_sentences: sentences until the next does not fit, across documents;
- contiguous: the same, but a sentence may be split, so that only the end of a block is padded;
- doc_sentences: sentences of one document;
- segment_pair, sentence_pair, sop: see `data_pipeline.packing.pairs`. A sentence longer than half a
  sequence is split into parts. So a unit of segment_pair or sop has two sentences or parts, unless
  its document has only one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.hashing import PackingDraw, array_keys, scalar_key
from data_pipeline.packing.kinds import PACKINGS
from data_pipeline.shards.blocks import Block


@dataclass(frozen=True)
class PackingRules:
    """The settings on which the number of sequences of a block depends."""

    kind: str
    length: int
    short_probability: float = 0.0

    @property
    def is_pair(self) -> bool:
        """Whether sequences are pairs of segments."""
        return bool(PACKINGS[self.kind].pair_labels)

    @property
    def needs_boundary(self) -> bool:
        """Whether each sequence is split into segments at a sentence boundary."""
        return PACKINGS[self.kind].needs_boundary

    @property
    def capacity(self) -> int:
        """The number of text tokens that fit into a sequence."""
        return self.length - (3 if self.is_pair else 2)

    @property
    def name(self) -> str:
        """A unique name of these rules, for file names."""
        short = f"-short{self.short_probability!r}" if self.short_probability else ""
        version = PACKINGS[self.kind].version
        units = f"-units{version}" if version else ""
        return f"{self.kind}-{self.length}{short}{units}"


@dataclass(frozen=True)
class Pieces:
    """The sentences in the stream. A sentence that is too long is several pieces."""

    starts: NDArray[np.int64]  # [pieces]
    ends: NDArray[np.int64]  # [pieces]
    documents: NDArray[np.int64]  # [pieces] ascending
    begins: NDArray[np.bool_]  # [pieces] True for the first piece of a sentence


@dataclass(frozen=True)
class Units:
    """Runs of pieces, each of which becomes one sequence: pieces first[i] up to last[i]."""

    first: NDArray[np.int64]  # [sequences]
    last: NDArray[np.int64]  # [sequences], exclusive


@dataclass(frozen=True)
class Spans:
    """The sequences of a block as spans of its stream: [sequences] each."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]


def stream(block: Block, separator: int) -> NDArray[np.integer]:
    """The tokens of a block with a separator after each document: [tokens + documents]."""
    sentence_ends = np.cumsum(block.sentences, dtype=np.int64)
    ends = sentence_ends[np.cumsum(block.documents, dtype=np.int64) - 1]
    joined = np.empty(len(block.tokens) + len(ends), block.tokens.dtype)
    is_text = np.ones(len(joined), bool)
    is_text[ends + np.arange(len(ends))] = False
    joined[is_text] = block.tokens
    joined[~is_text] = separator
    return joined


def count(block: Block, rules: PackingRules) -> int:
    """The number of sequences in a block."""
    if rules.kind == "contiguous":
        return len(_contiguous(block, rules).starts)
    return len(units(pieces(block, rules), rules, short_key(block)).first)


def single_spans(block: Block, rules: PackingRules) -> Spans:
    """The sequences of a block with a single-segment packing, in reading order."""
    if rules.kind == "contiguous":
        return _contiguous(block, rules)
    cut = pieces(block, rules)
    runs = units(cut, rules, short_key(block))
    starts = cut.starts[runs.first]
    return Spans(starts, cut.ends[runs.last - 1] - starts)


def pieces(block: Block, rules: PackingRules) -> Pieces:
    """The sentences of a block, split into pieces that fit into a sequence.

    If the packing needs a sentence boundary inside each sequence, no piece is longer than half a
    sequence, so that two fit. The pieces of a longer sentence are then about equal.
    """
    longest = rules.capacity // 2 if rules.needs_boundary else rules.capacity
    lengths = block.sentences.astype(np.int64)
    document = np.repeat(np.arange(len(block.documents)), block.documents)
    starts = np.cumsum(lengths) - lengths + document
    begins = np.ones(len(lengths), bool)
    parts = -(-lengths // longest)
    if parts.max(initial=1) > 1:
        nth = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
        each = -(-lengths // parts) if rules.needs_boundary else np.full_like(lengths, longest)
        before = nth * np.repeat(each, parts)
        starts = np.repeat(starts, parts) + before
        lengths = np.minimum(np.repeat(lengths, parts) - before, np.repeat(each, parts))
        document, begins = np.repeat(document, parts), nth == 0
    return Pieces(starts, starts + lengths, document, begins)


def units(cut: Pieces, rules: PackingRules, key: int) -> Units:
    """Group pieces greedily into sequences."""
    document_end = np.searchsorted(cut.documents, cut.documents, side="right")
    first = _chain(_UNIT_ENDS[rules.kind](cut, document_end, rules, key))
    if rules.needs_boundary:
        first = _rebalance_ends(first, document_end, cut.begins)
    last = np.append(first[1:], len(cut.starts))
    if not rules.is_pair:
        return Units(first, last)
    splittable = cut.ends[last - 1] - cut.starts[first] > 1  # a single token cannot be split
    return Units(first[splittable], last[splittable])


def _until_full(
    cut: Pieces, document_end: NDArray[np.int64], rules: PackingRules, key: int
) -> NDArray[np.int64]:
    """Take as many pieces as fit, across documents; at least two where a boundary is needed."""
    numbers = np.arange(len(cut.starts))
    targets = _targets(len(numbers), rules, key)
    last = np.searchsorted(cut.ends, cut.starts + targets, side="right")
    return np.maximum(last, numbers + (2 if rules.needs_boundary else 1))


def _within_document(
    cut: Pieces, document_end: NDArray[np.int64], rules: PackingRules, key: int
) -> NDArray[np.int64]:
    """Take as many pieces of one document as fit."""
    return np.minimum(_until_full(cut, document_end, rules, key), document_end)


def _two_sentences(
    cut: Pieces, document_end: NDArray[np.int64], rules: PackingRules, key: int
) -> NDArray[np.int64]:
    """Two pieces of one document; its last piece joins the two before it rather than stay alone."""
    numbers = np.arange(len(cut.starts))
    last = numbers + np.where(document_end - numbers == 3, 3, 2)
    return np.minimum(last, document_end)


# For each piece of a block, the end (exclusive) of the unit that begins with it.
_UNIT_ENDS = {
    "full_sentences": _until_full,
    "doc_sentences": _within_document,
    "segment_pair": _within_document,
    "sentence_pair": _two_sentences,
    "sop": _within_document,
}


def _rebalance_ends(
    first: NDArray[np.int64], document_end: NDArray[np.int64], begins: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Move a piece to each unit that is a single last sentence of its document.

    The piece comes from the end of the unit before it, and only if a sentence still begins inside
    that unit afterwards. Any two pieces fit into a sequence.
    """
    before = np.concatenate([[0], np.cumsum(begins)])  # sentences that begin before each piece
    alone = (np.diff(np.append(first, len(begins))) == 1) & begins[first]
    same_document = document_end[first[1:]] == document_end[first[:-1]]
    keeps = before[first[1:] - 1] > before[first[:-1] + 1]
    return first - np.concatenate([[False], alone[1:] & same_document & keeps])[: len(first)]


def short_key(block: Block) -> int:
    """The key of the draws that shorten sequences.

    It depends only on the block, so that the number of sequences is fixed.
    """
    sizes = len(block.tokens), len(block.sentences), len(block.documents)
    return scalar_key(PackingDraw.SHORT, *sizes)


def _targets(size: int, rules: PackingRules, key: int) -> NDArray[np.int64]:
    """The target length of a sequence that starts at each piece: [size]."""
    targets = np.full(size, rules.capacity)
    if rules.short_probability:
        draw = array_keys(key, np.arange(size))
        fraction = (draw >> np.uint64(32)).astype(np.int64) / 2.0**32
        shorter = 2 + ((draw & np.uint64(0xFFFFFFFF)) % np.uint64(rules.capacity - 1)).astype(int)
        targets = np.where(fraction < rules.short_probability, shorter, targets)
    return targets


def _contiguous(block: Block, rules: PackingRules) -> Spans:
    # The last sequence's own [SEP] replaces the separator of the last document.
    size = len(block.tokens) + len(block.documents) - 1
    starts = np.arange(0, size, rules.capacity)
    return Spans(starts, np.minimum(rules.capacity, size - starts))


def _chain(following: NDArray[np.int64]) -> NDArray[np.int64]:
    """The chain 0, following[0], following[following[0]], ... until it leaves the array."""
    successor = following.tolist()
    chain, at = [], 0
    while at < len(successor):
        chain.append(at)
        at = successor[at]
    return np.array(chain, np.int64)
