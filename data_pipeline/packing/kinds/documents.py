"""Documents in their order, cut where a row ends."""

from data_pipeline.packing import sequences
from data_pipeline.packing.sequences import DocumentPacking, PackingRules, Spans
from data_pipeline.shards.blocks import Block


@sequences.register_packing
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
