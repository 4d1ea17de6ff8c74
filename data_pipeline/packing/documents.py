"""Packing of documents: a row holds several whole documents, or pieces of them, without a gap.

Each span of a row is ``[CLS] span [SEP]``, attends to itself only, and counts its positions from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from data_pipeline.packing.sequences import Packing, Spans
from data_pipeline.shards.blocks import Block

SPECIAL = 2  # tokens around a span
# The tokens of the last row of the blocks that are packed together are padding, half of it on
# average. So longer rows take more blocks: of about 512k tokens each, 256 rows or more.
LENGTH_OF_ONE_BLOCK = 2048


class DocumentPacking(Packing):
    """A packing whose rows hold several documents."""

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
