"""Packing: how the text of a block becomes rows of at most L tokens. The registry of packings.

The block becomes a stream in which a separator follows each document. A row is a list of spans of
the stream: ``[CLS] span [SEP]``, or ``[CLS] span [SEP] span [SEP]`` of a pair, or each span in its
own [CLS] and [SEP] where documents are kept apart (`DocumentPacking`). If a span ends with its
document, the row's own [SEP] replaces the separator. A packing is a class in a module of
`data_pipeline.packing.kinds`, or in a file of `plugins:`, that `register_packing` decorates.

Each block, or a few of a shard together, is packed by itself, so the number of sequences of a
corpus is a sum over its blocks. It does not depend on the seed; only the pairing of segments
changes from epoch to epoch. Everything is computed for a block at once, from its boundaries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from data_pipeline.shards.blocks import Block

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

    Raises TypeError for a class that lacks a required method.
    """
    if missing := ", ".join(sorted(packing.__abstractmethods__)):
        raise TypeError(f"{packing.__name__} has to define {missing}")
    assert packing.name not in PACKINGS, f"two packings are called {packing.name}"
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
    return len(rules.packing.spans(block, rules))


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
