"""Documents in their order, cut where a row ends."""

from __future__ import annotations

from data_pipeline.packing.sequences import (
    SPECIAL,
    DocumentPacking,
    PackingRules,
    Spans,
    document_spans,
    register_packing,
    spans_of,
)
from data_pipeline.shards.blocks import Block


@register_packing
class Documents(DocumentPacking):
    """One document after the other; each attends to itself only, and a row's end cuts it."""

    name = "documents"

    def spans(self, block: Block, rules: PackingRules) -> Spans:
        rows: list[list[tuple[int, int]]] = []
        room = 0
        for first, length in zip(*(part.tolist() for part in document_spans(block)), strict=True):
            start, end = first, first + length
            while start < end:
                if room <= SPECIAL:
                    rows.append([])
                    room = rules.length
                size = min(end - start, room - SPECIAL)
                rows[-1].append((start, size))
                start += size
                room -= size + SPECIAL
        return spans_of(rows)
