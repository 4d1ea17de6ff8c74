"""Packings without pairs: of whole sentences, of all text, and of documents.

`best_fit` places documents into rows so that few are cut (arXiv 2404.10830).
"""

import numpy as np
from numpy.typing import NDArray

from data_pipeline.packing import sequences
from data_pipeline.packing.sequences import (
    DocumentPacking,
    Packing,
    PackingRules,
    Pieces,
    SentencePacking,
    Spans,
    register_packing,
)
from data_pipeline.shards.blocks import Block


@register_packing
class Contiguous(Packing):
    """Across documents; a sentence may be split, so that only the end of a block is padded."""

    name = "contiguous"

    def spans(self, block: Block, rules: PackingRules) -> Spans:
        # The last sequence's own [SEP] replaces the separator of the last document.
        size = len(block.tokens) + len(block.documents) - 1
        starts = np.arange(0, size, rules.capacity)
        return Spans.single(starts, np.minimum(rules.capacity, size - starts))


@register_packing
class Documents(DocumentPacking):
    """One document after the other; each attends to itself only, and a row's end cuts it."""

    name = "documents"

    def spans(self, block: Block, rules: PackingRules) -> Spans:
        rows: list[list[tuple[int, int]]] = []
        room = 0
        for first, length in zip(
            *(part.tolist() for part in sequences.document_spans(block)), strict=True
        ):
            start, end = first, first + length
            while start < end:
                if room <= sequences.SPECIAL:
                    rows.append([])
                    room = rules.length
                size = min(end - start, room - sequences.SPECIAL)
                rows[-1].append((start, size))
                start += size
                room -= size + sequences.SPECIAL
        return sequences.spans_of(rows)


SLACK = 0.002  # the padding that is left rather than filled with pieces of cut documents


@register_packing
class BestFit(DocumentPacking):
    """Documents go where the least room is left; only what is longer than a row is cut.

    The longest come first (best-fit decreasing). Where whole documents would leave more than a
    little padding, the last ones are cut to fill it.
    """

    name = "best_fit"

    def spans(self, block: Block, rules: PackingRules) -> Spans:
        starts, lengths = sequences.document_spans(block)
        parts = lengths // rules.capacity  # that fill a row
        nth = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
        full = np.repeat(starts, parts) + nth * rules.capacity
        rows = [[(start, rules.capacity)] for start in full.tolist()]
        starts, lengths = starts + parts * rules.capacity, lengths - parts * rules.capacity
        by_length = np.lexsort((starts, -lengths))[: np.count_nonzero(lengths)]
        rest = np.stack([starts, lengths], axis=1)[by_length].tolist()
        return sequences.spans_of([*rows, *_placed(rest, rules.length)])


def _placed(pieces: list[list[int]], length: int) -> list[list[tuple[int, int]]]:
    """Rows of these (start, length), which are sorted by length, the longest first."""
    used = sum(size + sequences.SPECIAL for _, size in pieces)
    most = int(used * (1 + SLACK) / length) + 1
    rows: list[list[tuple[int, int]]] = []
    by_room: list[list[int]] = [[] for _ in range(length + 1)]  # the rows with that room
    rooms = 0  # its bit r: there is a row with room r
    for first, size in pieces:
        start, end = first, first + size
        while start < end:
            enough = rooms >> (end - start + sequences.SPECIAL)
            if enough:
                room = end - start + sequences.SPECIAL + (enough & -enough).bit_length() - 1
            elif len(rows) >= most and rooms.bit_length() > sequences.SPECIAL + 1:
                room = rooms.bit_length() - 1  # the largest, for a part
            else:
                room = length
                by_room[room].append(len(rows))
                rows.append([])
            row = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
            part = min(end - start, room - sequences.SPECIAL)
            rows[row].append((start, part))
            start += part
            by_room[room - part - sequences.SPECIAL].append(row)
            rooms |= 1 << (room - part - sequences.SPECIAL)
    return rows


@register_packing
class FullSentences(SentencePacking):
    """Sentences until the next does not fit, across documents."""

    name = "full_sentences"

    def ends(self, cut: Pieces, rules: PackingRules, key: int) -> NDArray[np.int64]:
        return sequences.until_full(cut, rules, key)


@register_packing
class DocSentences(SentencePacking):
    """Sentences of one document until the next does not fit."""

    name = "doc_sentences"

    def ends(self, cut: Pieces, rules: PackingRules, key: int) -> NDArray[np.int64]:
        return np.minimum(sequences.until_full(cut, rules, key), cut.document_ends)
