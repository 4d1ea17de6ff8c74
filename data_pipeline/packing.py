"""Packing: how the sentences of one block become sequences of at most L tokens.

A block is packed on its own, so the number of sequences that a corpus makes is a sum over its
blocks. Everything is computed for a whole block at once from its boundaries.

The block becomes a stream in which a separator follows each document. A sequence is
``[CLS] stream[start : start + length] [SEP]``; the separator of a document that ends a sequence
is left to the sequence's own. RoBERTa (arXiv 1907.11692, section 4.2) defines the packings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.shards import Block

SPECIALS = 2  # [CLS] and the last [SEP]


@dataclass(frozen=True)
class Spans:
    """Where the sequences of a block lie in its stream."""

    starts: NDArray[np.int64]  # [sequences]
    lengths: NDArray[np.int64]  # [sequences] tokens, [CLS] and the last [SEP] not counted


def stream(block: Block, separator: int) -> NDArray[np.integer]:
    """The tokens of a block with a separator after each document: [tokens + documents]."""
    ends = _document_ends(block)
    joined = np.empty(len(block.tokens) + len(ends), block.tokens.dtype)
    is_text = np.ones(len(joined), bool)
    is_text[ends + np.arange(len(ends))] = False
    joined[is_text] = block.tokens
    joined[~is_text] = separator
    return joined


def spans(block: Block, packing: str, length: int) -> Spans:
    """The sequences that `block` makes at sequence length `length`, in reading order."""
    if packing == "contiguous":
        return _contiguous(len(block.tokens) + len(block.documents), length - SPECIALS)
    starts, ends, last_of_document = _pieces(block, length - SPECIALS)
    fits = np.searchsorted(ends, starts + (length - SPECIALS), side="right")
    if packing == "doc_sentences":
        fits = np.minimum(fits, last_of_document + 1)
    first = _follow(fits)
    return Spans(starts[first], ends[fits[first] - 1] - starts[first])


def _contiguous(size: int, capacity: int) -> Spans:
    # The separator of the block's last document is the sequence's own.
    starts = np.arange(0, size - 1, capacity)
    return Spans(starts, np.minimum(capacity, size - 1 - starts))


def _document_ends(block: Block) -> NDArray[np.int64]:
    """The token at which each document ends: [documents]."""
    sentence_ends = np.cumsum(block.sentences, dtype=np.int64)
    return sentence_ends[np.cumsum(block.documents, dtype=np.int64) - 1]


def _pieces(
    block: Block, capacity: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Sentences as (start, end) in the stream and the last piece of each one's document.

    A sentence longer than `capacity` is several pieces.
    """
    lengths = block.sentences.astype(np.int64)
    pieces = -(-lengths // capacity)
    document = np.repeat(np.arange(len(block.documents)), block.documents)
    starts = np.cumsum(lengths) - lengths + document
    if pieces.max(initial=1) > 1:
        nth = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        remaining = np.repeat(lengths, pieces) - nth * capacity
        starts = np.repeat(starts, pieces) + nth * capacity
        lengths = np.minimum(remaining, capacity)
        document = np.repeat(document, pieces)
    last_of_document = np.searchsorted(document, document, side="right") - 1
    return starts, starts + lengths, last_of_document


def _follow(following: NDArray[np.int64]) -> NDArray[np.int64]:
    """The chain 0, following[0], following[following[0]], ... up to the end."""
    successor = following.tolist()
    chain, at = [], 0
    while at < len(successor):
        chain.append(at)
        at = successor[at]
    return np.array(chain, np.int64)
