"""Pairs of segments: next sentence, and the order of two."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from data_pipeline.hashing import PairDraw, array_keys
from data_pipeline.packing.pairs import PairPacking, PairSpans, donors_of, draw, partners_of
from data_pipeline.packing.pieces import Pieces, until_full
from data_pipeline.packing.sequences import PackingRules, register_packing


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


@register_packing
class SegmentPair(NextSegment):
    """Runs of sentences; the second one follows the first, or is from another document."""

    name = "segment_pair"
    needs_boundary = True
    draws_lengths = True

    def ends(self, cut: Pieces, rules: PackingRules, key: int) -> NDArray[np.int64]:
        return np.minimum(until_full(cut, rules, key, least=2), cut.document_ends)


@register_packing
class SentencePair(NextSegment):
    """Two sentences; the second one follows the first, or is from another document."""

    name = "sentence_pair"
    draws_lengths = False

    def ends(self, cut: Pieces, rules: PackingRules, key: int) -> NDArray[np.int64]:
        """A document's last piece joins the two before it rather than stay alone."""
        numbers = np.arange(len(cut.starts))
        last = numbers + np.where(cut.document_ends - numbers == 3, 3, 2)
        return np.minimum(last, cut.document_ends)


@register_packing
class SentenceOrder(PairPacking):
    """Runs of sentences of one document, in order or, half of them, swapped."""

    name = "sop"
    pair_labels = ("in order", "swapped")
    needs_boundary = True

    def ends(self, cut: Pieces, rules: PackingRules, key: int) -> NDArray[np.int64]:
        return np.minimum(until_full(cut, rules, key, least=2), cut.document_ends)

    def label(self, pairs: PairSpans, documents: NDArray[np.int64], key: int) -> PairSpans:
        chosen = draw(key, PairDraw.LABEL, len(documents), 2) == 1
        return PairSpans(
            np.where(chosen, pairs.second_starts, pairs.first_starts),
            np.where(chosen, pairs.second_lengths, pairs.first_lengths),
            np.where(chosen, pairs.first_starts, pairs.second_starts),
            np.where(chosen, pairs.first_lengths, pairs.second_lengths),
            chosen.astype(np.int64),
        )
