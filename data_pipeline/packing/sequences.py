"""Packing: how the text of a block becomes rows of at most L tokens. The registry of packings.

The block becomes a stream in which a separator follows each document. A row is a list of spans of
the stream: ``[CLS] span [SEP]``, or ``[CLS] span [SEP] span [SEP]`` of a pair, or each span in its
own [CLS] and [SEP] where documents are kept apart (`DocumentPacking`). If a span ends with its
document, the row's own [SEP] replaces the separator. A packing is a class in a module of
`data_pipeline.packing.kinds`, or in a file of `plugins:`, that `register_packing` decorates.

Each block, or a few of a shard together, is packed by itself, so the number of sequences of a
corpus is a sum over its blocks. It does not depend on the seed; only the pairing of segments
changes from epoch to epoch. Everything is computed for a block at once, from its boundaries.

A packing of this sort (`SentencePacking`) says only where the unit ends that begins with a piece.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from configs.kinds import require_new, require_returned
from data_pipeline.errors import DataError
from data_pipeline.hashing import PackingDraw, array_keys, scalar_key
from data_pipeline.shards.blocks import Block, offsets

SPECIAL = 2  # tokens around a span
# The tokens of the last row of the blocks that are packed together are padding, half of it on
# average. So longer rows take more blocks: of about 512k tokens each, 256 rows or more.
LENGTH_OF_ONE_BLOCK = 2048


@dataclass(frozen=True)
class Spans:
    """The rows of a block as lists of spans of its stream: row i has first[i] up to first[i + 1].

    The order of the spans in a row is the order of their text.
    """

    starts: NDArray[np.int64]  # [spans]
    lengths: NDArray[np.int64]  # [spans] at least 1
    first: NDArray[np.int64]  # [rows + 1]

    @classmethod
    def single(cls, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Spans:
        """Rows of one span each."""
        return cls(starts, lengths, np.arange(len(starts) + 1))

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.first) - 1

    def of_rows(self, rows: NDArray[np.int64]) -> list[list[tuple[int, int]]]:
        """(start, length) of each span of these rows."""
        spans = list(zip(self.starts.tolist(), self.lengths.tolist(), strict=True))
        ends = zip(self.first[rows].tolist(), self.first[rows + 1].tolist(), strict=True)
        return [spans[first:last] for first, last in ends]


class Packing(ABC):
    """A rule that makes rows of a block, and its properties that the rest of the pipeline reads.

    name: the value of `data.packing`. pair_labels: what labels 0 and 1 of its pairs mean; empty: no
    pairs. draws_lengths: some rows may aim at a random smaller length. separates_documents: each
    span has its own [CLS], attends to itself only, and counts its positions from 0. version: of the
    rule; cached counts of sequences of another version are not read.
    """

    name: ClassVar[str]
    pair_labels: ClassVar[tuple[str, ...]] = ()
    draws_lengths: ClassVar[bool] = False
    separates_documents: ClassVar[bool] = False
    version: ClassVar[int] = 0

    @abstractmethod
    def spans(self, block: Block, rules: PackingRules) -> Spans:
        """The rows of a block in reading order; of pairs, the units that are split in two.

        Of `block` only the boundaries are read, so that the index determines the rows.
        """

    def blocks(self, length: int) -> int:
        """How many neighbouring blocks of a shard are packed as one, at a length of rows."""
        return 1


PACKINGS: dict[str, Packing] = {}
_Class = TypeVar("_Class", bound=type[Packing])


def register_packing(packing: _Class) -> _Class:
    """A decorator: `data.packing` may be this class's `name`.

    Raises TypeError as `require_new`.
    """
    require_new(packing, Packing, PACKINGS, packing.name)
    PACKINGS[packing.name] = packing()
    return packing


@dataclass(frozen=True)
class PackingRules:
    """The settings on which the number of sequences of a block depends."""

    kind: str
    length: int
    short_probability: float = 0.0

    @property
    def packing(self) -> Packing:
        """The packing of this kind."""
        return PACKINGS[self.kind]

    @property
    def is_pair(self) -> bool:
        """Whether sequences are pairs of segments."""
        return bool(self.packing.pair_labels)

    @property
    def capacity(self) -> int:
        """The number of text tokens that fit into a sequence."""
        return self.length - (3 if self.is_pair else 2)

    @property
    def blocks(self) -> int:
        """How many neighbouring blocks of a shard are packed as one."""
        return self.packing.blocks(self.length)

    @property
    def name(self) -> str:
        """A unique name of these rules, for file names."""
        short = f"-short{self.short_probability!r}" if self.short_probability else ""
        version = self.packing.version
        units = f"-units{version}" if version else ""
        return f"{self.kind}-{self.length}{short}{units}"

    def spans(self, block: Block) -> Spans:
        """The rows of a block, or the units of pairs.

        Raises DataError where the packing, perhaps a plugin's, has made no such rows.
        """
        name = f"{type(self.packing).__name__}.spans"
        spans = require_returned(self.packing.spans(block, self), Spans, name)
        if not self._fit(spans, len(block.tokens) + len(block.documents)):
            raise DataError(
                f"data.packing: {self.kind}: its `spans` must be arrays of integers, with rows of "
                f"one span or more, which lie in the block and have a token or more each, and of "
                f"at most {self.length} tokens, special ones included"
            )
        return spans

    def _fit(self, spans: Spans, tokens: int) -> bool:
        """Whether the spans are in a stream of this many tokens, and the rows not too long.

        Units of pairs may be too long: they are truncated.
        """
        parts = (spans.starts, spans.lengths, spans.first)
        if not all(isinstance(part, np.ndarray) and part.dtype.kind in "iu" for part in parts):
            return False
        starts, lengths, first = parts
        if not len(first) or first[0] or not len(starts) == len(lengths) == first[-1]:
            return False
        outside = (starts < 0) | (lengths < 1) | (starts + lengths > tokens)
        if outside.any() or (np.diff(first) < 1).any():
            return False
        apart = self.packing.separates_documents
        used = np.diff(offsets(lengths + 1 + apart)[first]) + (not apart)
        return self.is_pair or bool((used <= self.length).all())


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
    return len(rules.spans(block))


class DocumentPacking(Packing):
    """A packing whose rows hold several documents, or pieces of them, without a gap.

    Each span of a row attends to itself only, and counts its positions from 0.
    """

    separates_documents: ClassVar[bool] = True

    def blocks(self, length: int) -> int:
        return -(-length // LENGTH_OF_ONE_BLOCK)


def document_spans(block: Block) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The starts in the stream, and the lengths, of a block's documents: [documents] each."""
    firsts = np.cumsum(block.documents, dtype=np.int64) - block.documents
    lengths = np.add.reduceat(block.sentences, firsts, dtype=np.int64)
    return np.cumsum(lengths) - lengths + np.arange(len(lengths)), lengths


def spans_of(rows: Sequence[Sequence[tuple[int, int]]]) -> Spans:
    """The rows that have these (start, length); a row's spans come in the order of the text."""
    spans = np.array([span for row in rows for span in sorted(row)], np.int64).reshape(-1, 2)
    return Spans(spans[:, 0], spans[:, 1], np.cumsum([0, *map(len, rows)]))


@dataclass(frozen=True)
class Pieces:
    """The sentences in the stream. A sentence that is too long is several pieces."""

    starts: NDArray[np.int64]  # [pieces]
    ends: NDArray[np.int64]  # [pieces]
    documents: NDArray[np.int64]  # [pieces] ascending
    begins: NDArray[np.bool_]  # [pieces] True for the first piece of a sentence

    @cached_property
    def document_ends(self) -> NDArray[np.int64]:
        """[pieces] the number of the piece after the last one of the piece's document."""
        return np.searchsorted(self.documents, self.documents, side="right")


@dataclass(frozen=True)
class Units:
    """Runs of pieces, each of which becomes one sequence: pieces first[i] up to last[i]."""

    first: NDArray[np.int64]  # [sequences]
    last: NDArray[np.int64]  # [sequences], exclusive


class SentencePacking(Packing):
    """A packing of whole sentences.

    needs_boundary: each sequence is split in two at the beginning of a sentence.
    """

    draws_lengths: ClassVar[bool] = True
    needs_boundary: ClassVar[bool] = False

    @abstractmethod
    def ends(self, cut: Pieces, rules: PackingRules, key: int) -> NDArray[np.int64]:
        """For each piece of a block, the end (exclusive) of the unit that begins with it."""

    def spans(self, block: Block, rules: PackingRules) -> Spans:
        cut = self.pieces(block, rules)
        runs = self.units(cut, rules, short_key(block))
        starts = cut.starts[runs.first]
        return Spans.single(starts, cut.ends[runs.last - 1] - starts)

    def pieces(self, block: Block, rules: PackingRules) -> Pieces:
        """The sentences of a block, split into pieces that fit into a sequence.

        If the packing needs a sentence boundary inside each sequence, no piece is longer than half
        a sequence, so that two fit. The pieces of a longer sentence are then about equal.
        """
        longest = rules.capacity // 2 if self.needs_boundary else rules.capacity
        lengths = block.sentences.astype(np.int64)
        document = np.repeat(np.arange(len(block.documents)), block.documents)
        starts = np.cumsum(lengths) - lengths + document
        begins = np.ones(len(lengths), bool)
        parts = -(-lengths // longest)
        if parts.max(initial=1) > 1:
            nth = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
            each = -(-lengths // parts) if self.needs_boundary else np.full_like(lengths, longest)
            before = nth * np.repeat(each, parts)
            starts = np.repeat(starts, parts) + before
            lengths = np.minimum(np.repeat(lengths, parts) - before, np.repeat(each, parts))
            document, begins = np.repeat(document, parts), nth == 0
        return Pieces(starts, starts + lengths, document, begins)

    def units(self, cut: Pieces, rules: PackingRules, key: int) -> Units:
        """Group pieces greedily into sequences."""
        ends, numbers = self.ends(cut, rules, key), np.arange(len(cut.starts))
        if np.shape(ends) != numbers.shape or (ends <= numbers).any():
            raise DataError(
                f"data.packing: {self.name}: its `ends` must be an array with a number behind its "
                f"own for each of the {len(numbers)} pieces"
            )
        first = _chain(ends)
        if self.needs_boundary:
            first = _rebalance_ends(first, cut.document_ends, cut.begins)
        last = np.append(first[1:], len(cut.starts))
        if not rules.is_pair:
            return Units(first, last)
        splittable = cut.ends[last - 1] - cut.starts[first] > 1  # a single token cannot be split
        return Units(first[splittable], last[splittable])


def until_full(cut: Pieces, rules: PackingRules, key: int, least: int = 1) -> NDArray[np.int64]:
    """The ends of units of as many pieces as fit, but `least`, across documents."""
    numbers = np.arange(len(cut.starts))
    targets = _targets(len(numbers), rules, key)
    last = np.searchsorted(cut.ends, cut.starts + targets, side="right")
    return np.maximum(last, numbers + least)


def short_key(block: Block) -> int:
    """The key of the draws that shorten sequences.

    It depends only on the block, so that the number of sequences is fixed.
    """
    return scalar_key(PackingDraw.SHORT, *block.sizes)


def _rebalance_ends(
    first: NDArray[np.int64], document_end: NDArray[np.int64], begins: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Move a piece to each unit that is a single last sentence of its document.

    The piece comes from the end of the unit before it, and only if a sentence still begins inside
    that unit afterwards. Any two pieces fit into a sequence.
    """
    before = offsets(begins)  # sentences that begin before each piece
    alone = (np.diff(np.append(first, len(begins))) == 1) & begins[first]
    same_document = document_end[first[1:]] == document_end[first[:-1]]
    keeps = before[first[1:] - 1] > before[first[:-1] + 1]
    return first - np.concatenate([[False], alone[1:] & same_document & keeps])[: len(first)]


def _targets(size: int, rules: PackingRules, key: int) -> NDArray[np.int64]:
    """The target length of a sequence that starts at each piece: [size]."""
    targets: NDArray[np.int64] = np.full(size, rules.capacity)
    if rules.short_probability:
        draw = array_keys(key, np.arange(size))
        fraction = (draw >> np.uint64(32)).astype(np.int64) / 2.0**32
        shorter = 2 + ((draw & np.uint64(0xFFFFFFFF)) % np.uint64(rules.capacity - 1)).astype(int)
        targets = np.where(fraction < rules.short_probability, shorter, targets)
    return targets


def _chain(following: NDArray[np.int64]) -> NDArray[np.int64]:
    """The chain 0, following[0], following[following[0]], ... until it leaves the array."""
    successor = following.tolist()
    chain, at = [], 0
    while at < len(successor):
        chain.append(at)
        at = successor[at]
    return np.array(chain, np.int64)
