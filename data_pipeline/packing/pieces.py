"""Packing of whole sentences: they are cut into pieces that fit, and grouped into units.

A packing of this sort (`SentencePacking`) says only where the unit ends that begins with a piece.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from data_pipeline.hashing import PackingDraw, array_keys, scalar_key
from data_pipeline.packing.sequences import Packing, PackingRules, Spans
from data_pipeline.shards.blocks import Block


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
        first = _chain(self.ends(cut, rules, key))
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
    sizes = len(block.tokens), len(block.sentences), len(block.documents)
    return scalar_key(PackingDraw.SHORT, *sizes)


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


def _targets(size: int, rules: PackingRules, key: int) -> NDArray[np.int64]:
    """The target length of a sequence that starts at each piece: [size]."""
    targets = np.full(size, rules.capacity)
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
