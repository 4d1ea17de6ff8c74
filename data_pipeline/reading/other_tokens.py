"""The rows of a corpus by another of its tokenizers: the same spans of the same documents.

A row has the tokens of the aligned spans (`data_pipeline.tokenization.alignment`) that lie in it. A
span that the row cuts in two is in no row of the other tokenizer. If a token is masked, so are the
other's tokens in its aligned span, and in the same way: as masks, random tokens, or as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from data_pipeline.hashing import MaskDraw, array_keys, random_uint32
from data_pipeline.masking.masker import NO_LABEL
from data_pipeline.reading.batches import (
    DEFAULT_VIEW,
    MASKED,
    Batch,
    Runs,
    Target,
    filled,
    shared_view,
)
from data_pipeline.shards.blocks import Block, offsets
from data_pipeline.tokenization.tokenizer import Vocabulary

KEPT, MASK, RANDOM = range(3)  # what becomes of a chosen token
_ONE = np.ones((2, 1), np.int64)  # the sizes of the span of a special token


@dataclass(frozen=True)
class OtherView:
    """A form of text for learners of another tokenizer than the corpora's first.

    numbers: which of its other tokenizers it is, for each corpus; longest: how many tokens a row
    may have, in whole aligned spans.
    """

    numbers: Sequence[int]
    vocabulary: Vocabulary
    longest: int | None = None


@dataclass(frozen=True)
class OtherStream:
    """The text of a block by another tokenizer, with a separator after each document.

    ours, theirs: [spans + 1] where the aligned spans begin in the block's own stream and in `text`,
    and where the last one ends. A separator is a span.
    """

    text: NDArray[np.integer]
    ours: NDArray[np.int64]
    theirs: NDArray[np.int64]

    @classmethod
    def of(cls, block: Block, number: int, separator: int) -> OtherStream:
        """The text of a block by its tokenizer `number`, from 0."""
        other = block.others[number]
        ends = np.cumsum(other.spans, dtype=np.int64)
        ours, theirs = (
            offsets(np.insert(sizes.astype(np.int64), ends, 1))
            for sizes in (other.ours, other.theirs)
        )
        behind = offsets(other.theirs)[ends]
        return cls(np.insert(other.tokens, behind, separator), ours, theirs)

    @classmethod
    def joined(cls, streams: Sequence[OtherStream]) -> OtherStream:
        """One behind the other."""
        sizes = [[np.diff(part) for part in (it.ours, it.theirs)] for it in streams]
        ours, theirs = (offsets(np.concatenate(parts)) for parts in zip(*sizes, strict=True))
        return cls(np.concatenate([it.text for it in streams]), ours, theirs)

    @classmethod
    def unread(cls, size: int) -> OtherStream:
        """In place of a block whose own stream has this size."""
        return cls(np.zeros(0, np.uint16), np.array([0, size]), np.zeros(2, np.int64))

    def within(self, start: int, end: int) -> tuple[int, int]:
        """The aligned spans that lie in these places of the block's own stream: first, end."""
        first, last = (int(np.searchsorted(self.ours[:-1], place)) for place in (start, end))
        return first, max(first, min(last, int(np.searchsorted(self.ours[1:], end, "right"))))


@dataclass(frozen=True)
class OtherRow:
    """A row by another tokenizer, and its aligned spans that have tokens of both."""

    ids: NDArray[np.int64]  # [L']
    segments: NDArray[np.int64]  # [L']
    documents: NDArray[np.int64]  # [L'] from 1
    ours: NDArray[np.int64]  # [2, S] each span's first column in the row itself, and its tokens
    theirs: NDArray[np.int64]  # [2, S] likewise by the other tokenizer

    @classmethod
    def of(
        cls, text: OtherStream, parts: Sequence[tuple[int, int]], view: OtherView, separates: bool
    ) -> OtherRow:
        """The row of these `parts` (start, length) of the block's own stream.

        `separates`: each has its own [CLS], as `Packing.separates_documents` says.
        """
        places: list[NDArray[np.int64]] = []
        sizes: list[NDArray[np.int64]] = []
        ids: list[NDArray[np.integer]] = []
        numbers: list[int] = []
        begin, separator = np.zeros(2, np.int64), np.array([view.vocabulary.sep])
        for number, (start, length) in enumerate(parts):
            opens = int(separates or not number)
            begin = begin + opens
            first, last = text.within(start, start + length)
            if view.longest is not None:
                room = view.longest - begin[1] - 1
                if room < 0:
                    break
                fits = np.searchsorted(text.theirs, text.theirs[first] + room, "right") - 1
                last = min(last, int(fits))
            edges = np.stack([part[first : last + 1] for part in (text.ours, text.theirs)])
            origin = np.array([start, text.theirs[first]])
            tokens = text.text[text.theirs[first] : text.theirs[last]]
            end = begin + np.array([length, len(tokens)])
            places += [(begin - 1)[:, None]] * opens
            places += [(edges - origin[:, None] + begin[:, None])[:, :-1], end[:, None]]
            sizes += [_ONE] * opens + [np.diff(edges), _ONE]
            ids += [*[np.array([view.vocabulary.cls])] * opens, tokens, separator]
            numbers += [number] * (opens + len(tokens) + 1)
            begin = end + 1
        where, counts = np.concatenate(places, axis=1), np.concatenate(sizes, axis=1)
        both = counts.all(axis=0)
        ours, theirs = np.stack([where, counts], axis=1)[:, :, both]
        part = np.array(numbers, np.int64)
        segments, documents = (0 * part, part + 1) if separates else (part, 0 * part + 1)
        return cls(np.concatenate(ids).astype(np.int64), segments, documents, ours, theirs)

    @classmethod
    def unreadable(cls, vocabulary: Vocabulary) -> OtherRow:
        """[CLS] [SEP], as the row itself."""
        both = np.array([[0, 1], [1, 1]])
        ids = np.array([vocabulary.cls, vocabulary.sep])
        return cls(ids, np.zeros(2, int), np.ones(2, int), both, both)


@dataclass(frozen=True)
class _Corrupted:
    """The predicted part of a row: M tokens of the other tokenizer, of which N can be compared."""

    ids: NDArray[np.int64]  # [L']
    positions: NDArray[np.int64]  # [M] columns
    labels: NDArray[np.int64]  # [M]
    compared: NDArray[np.int64]  # [3, N] span, slot in the row itself, slot by the other tokenizer


def with_view(
    batch: Batch,
    name: str,
    view: OtherView,
    rows: Sequence[OtherRow],
    mask: int,
    keys: NDArray[np.uint64],
) -> Batch:
    """The batch with `rows`, its own by another tokenizer, as a view, and what both share as one.

    `mask` is the batch's mask token, and `keys` [R] are those of its masks.
    """
    columns, labels = batch.targets[MASKED].positions, batch.targets[MASKED].labels
    assert columns is not None
    shown = np.take_along_axis(batch.input_ids, columns, axis=1)
    kinds = np.where(shown == mask, MASK, np.where(shown == labels, KEPT, RANDOM))
    chosen = labels != NO_LABEL
    read = [
        _corrupted(row, columns[at, some], kinds[at, some], view.vocabulary, keys[at : at + 1])
        for at, (row, some) in enumerate(zip(rows, chosen, strict=True))
    ]
    pad, packed = view.vocabulary.pad, batch.document_ids is not None
    target = Target(
        filled([row.labels for row in read], NO_LABEL), filled([row.positions for row in read])
    )
    theirs = replace(
        batch,
        input_ids=filled([row.ids for row in read], pad),
        segment_ids=filled([row.segments for row in rows]),
        attention_mask=filled([np.ones_like(row.ids) for row in rows]),
        document_ids=filled([row.documents for row in rows]) if packed else None,
        targets={**batch.targets, MASKED: target},
        readable=None,
        is_trimmed=True,
    )
    shared = _shared(theirs, rows, read, name)
    return replace(
        batch, views={**batch.views, name: theirs, shared_view(DEFAULT_VIEW, name): shared}
    )


def _shared(
    theirs: Batch, rows: Sequence[OtherRow], read: Sequence[_Corrupted], name: str
) -> Batch:
    """The aligned spans of a batch as its positions."""
    spans, *slots = (filled([row.compared[part] for row in read]) for part in range(3))
    labels = filled([row.labels[row.compared[2]] for row in read], NO_LABEL, least=spans.shape[1])
    zeros = filled([0 * row.ours[0] for row in rows])
    documents = [row.documents[row.theirs[0]] for row in rows]
    runs = {
        view: Runs(filled([side[0] for side in sides]), filled([side[1] for side in sides]), slot)
        for view, sides, slot in (
            (DEFAULT_VIEW, [row.ours for row in rows], slots[0]),
            (name, [row.theirs for row in rows], slots[1]),
        )
    }
    return replace(
        theirs,
        input_ids=zeros,
        segment_ids=zeros,
        attention_mask=filled([np.ones_like(row.ours[0]) for row in rows]),
        document_ids=None if theirs.document_ids is None else filled(documents),
        targets={**theirs.targets, MASKED: Target(labels, spans)},
        runs=runs,
    )


def _corrupted(
    row: OtherRow,
    columns: NDArray[np.int64],
    kinds: NDArray[np.int64],
    vocabulary: Vocabulary,
    key: NDArray[np.uint64],
) -> _Corrupted:
    """A row where these columns of the row itself are chosen; a span's first one decides.

    `key` [1] is that of its masks.
    """
    starts, sizes = row.ours
    span = np.searchsorted(starts, columns, side="right") - 1
    slots = np.flatnonzero(columns < starts[span] + sizes[span])  # not in a span that the row cuts
    chosen, first = np.unique(span[slots], return_index=True)
    slots = slots[first]
    counts = row.theirs[1][chosen]
    before = np.cumsum(counts) - counts
    places = np.repeat(row.theirs[0][chosen] - before, counts) + np.arange(counts.sum())
    kind, labels = np.repeat(kinds[slots], counts), row.ids[places]
    keys, ordinary = array_keys(int(MaskDraw.OTHER), key.view(np.int64)), vocabulary.ordinary
    draws = random_uint32(keys, places)[0].astype(np.int64)
    random_ids = ordinary[(draws * len(ordinary)) >> 32]
    ids = row.ids.copy()
    ids[places] = np.choose(kind, [labels, vocabulary.mask, random_ids])
    alone = (counts == 1) & (row.ours[1][chosen] == 1)
    return _Corrupted(ids, places, labels, np.stack([chosen, slots, before])[:, alone])
