"""Packing: how the sentences of one block become sequences of at most L tokens.

A block is packed on its own, so the number of sequences that a corpus makes is a sum over its
blocks, and it depends on no seed: only which text is joined to which changes from epoch to epoch.
Everything is computed for a whole block at once from its boundaries.

The block becomes a stream in which a separator follows each document. A sequence is
``[CLS] first [SEP]`` or ``[CLS] first [SEP] second [SEP]``, where first and second are segments
of the stream; the separator of a document that ends a segment is left to the sequence's own.
RoBERTa (arXiv 1907.11692, section 4.2) defines the packings, ALBERT (1909.11942) sentence order.

- full_sentences: sentences until the next does not fit, across documents;
- contiguous: the same, but a sentence may be split, so nothing is padded but the block's end;
- doc_sentences: sentences of one document;
- segment_pair, sentence_pair, sop: see `data_pipeline.packing.pairs`. A unit of segment_pair or
  sop has two sentences, or parts of two, wherever its document has them: no part is longer than
  half a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.config import PAIR_PACKINGS
from data_pipeline.hashing import array_keys, scalar_key
from data_pipeline.shards.blocks import Block

SHORT = 21  # what a hash decides; part of its key
PAIR_UNITS = 2  # of which kind the units of pairs are; counts of another kind are not read


@dataclass(frozen=True)
class PackingRules:
    """What the number of sequences of a block depends on."""

    kind: str
    length: int
    short_probability: float = 0.0

    @property
    def is_pair(self) -> bool:
        """Whether sequences are pairs of segments."""
        return self.kind in PAIR_PACKINGS

    @property
    def needs_boundary(self) -> bool:
        """Whether a sequence is split at a boundary between sentences."""
        return self.kind in ("segment_pair", "sop")

    @property
    def capacity(self) -> int:
        """Text tokens that fit into a sequence."""
        return self.length - (3 if self.is_pair else 2)

    @property
    def name(self) -> str:
        """A name for files, different for different rules."""
        short = f"-short{self.short_probability:g}" if self.short_probability else ""
        units = f"-units{PAIR_UNITS}" if self.is_pair else ""
        return f"{self.kind}-{self.length}{short}{units}"


@dataclass(frozen=True)
class Pieces:
    """Sentences in the stream; one that is too long is several pieces."""

    starts: NDArray[np.int64]  # [pieces]
    ends: NDArray[np.int64]  # [pieces]
    documents: NDArray[np.int64]  # [pieces] ascending
    begins: NDArray[np.bool_]  # [pieces] whether it begins its sentence


@dataclass(frozen=True)
class Units:
    """Runs of pieces that each become one sequence: pieces first[i] up to last[i]."""

    first: NDArray[np.int64]  # [sequences]
    last: NDArray[np.int64]  # [sequences], exclusive


@dataclass(frozen=True)
class Spans:
    """Where the sequences of a block lie in its stream: [sequences] each."""

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
    """The number of sequences that a block makes."""
    if rules.kind == "contiguous":
        return len(_contiguous(block, rules).starts)
    return len(units(pieces(block, rules), rules, short_key(block)).first)


def single_spans(block: Block, rules: PackingRules) -> Spans:
    """The sequences that a block makes with a packing of single segments, in reading order."""
    if rules.kind == "contiguous":
        return _contiguous(block, rules)
    cut = pieces(block, rules)
    runs = units(cut, rules, short_key(block))
    starts = cut.starts[runs.first]
    return Spans(starts, cut.ends[runs.last - 1] - starts)


def pieces(block: Block, rules: PackingRules) -> Pieces:
    """The sentences of a block, none longer than the text of a sequence.

    Where sequences are split between sentences, none is longer than half of it, so that two fit;
    the parts of a longer one are about equal.
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
    numbers = np.arange(len(cut.starts))
    if rules.kind == "sentence_pair":
        # A third sentence joins the pair rather than stay alone at the end of its document.
        last = numbers + np.where(document_end - numbers == 3, 3, 2)
    else:
        targets = _targets(len(numbers), rules, key)
        last = np.searchsorted(cut.ends, cut.starts + targets, side="right")
        last = np.maximum(last, numbers + (2 if rules.needs_boundary else 1))
    if rules.kind != "full_sentences":
        last = np.minimum(last, document_end)
    first = _follow(last)
    if rules.needs_boundary:
        first = _share_ends(first, document_end, cut.begins)
    last = np.append(first[1:], len(numbers))
    if not rules.is_pair:
        return Units(first, last)
    splittable = cut.ends[last - 1] - cut.starts[first] > 1  # a single token is no two segments
    return Units(first[splittable], last[splittable])


def _share_ends(
    first: NDArray[np.int64], document_end: NDArray[np.int64], begins: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Give a sentence that is left alone at its document's end the piece before it.

    If a sentence still begins inside the unit that gives it. Any two pieces fit into a sequence.
    """
    before = np.concatenate([[0], np.cumsum(begins)])  # how many begin before each piece
    alone = (np.diff(np.append(first, len(begins))) == 1) & begins[first]
    same_document = document_end[first[1:]] == document_end[first[:-1]]
    keeps = before[first[1:] - 1] > before[first[:-1] + 1]
    return first - np.concatenate([[False], alone[1:] & same_document & keeps])[: len(first)]


def short_key(block: Block) -> int:
    """The key of the draws that shorten sequences: of the block alone, for counts to be fixed."""
    return scalar_key(SHORT, len(block.tokens), len(block.sentences), len(block.documents))


def _targets(size: int, rules: PackingRules, key: int) -> NDArray[np.int64]:
    """The length that a sequence starting at each piece aims at: [size]."""
    targets = np.full(size, rules.capacity)
    if rules.short_probability:
        draw = array_keys(key, np.arange(size))
        fraction = (draw >> np.uint64(32)).astype(np.int64) / 2.0**32
        shorter = 2 + ((draw & np.uint64(0xFFFFFFFF)) % np.uint64(rules.capacity - 1)).astype(int)
        targets = np.where(fraction < rules.short_probability, shorter, targets)
    return targets


def _contiguous(block: Block, rules: PackingRules) -> Spans:
    # The separator of the block's last document is the sequence's own.
    size = len(block.tokens) + len(block.documents) - 1
    starts = np.arange(0, size, rules.capacity)
    return Spans(starts, np.minimum(rules.capacity, size - starts))


def _follow(following: NDArray[np.int64]) -> NDArray[np.int64]:
    """The chain 0, following[0], following[following[0]], ... up to the end."""
    successor = following.tolist()
    chain, at = [], 0
    while at < len(successor):
        chain.append(at)
        at = successor[at]
    return np.array(chain, np.int64)
