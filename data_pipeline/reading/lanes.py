"""Filling rows with packed sequences, in the order of `data_pipeline.order`.

`Lanes` fills some rows of the global batch from one split. Each row holds the block that it reads;
rows that read the same block share it. Memory: about 1.5 MB per open block, 4 MB with pairs, which
hold the pool of their block. At most one block per row, or all blocks of the split if these are
fewer, are open, plus `SPARE_BLOCKS`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import BadShard
from data_pipeline.hashing import TextDraw, scalar_key
from data_pipeline.masking.masker import NO_LABEL
from data_pipeline.order import BatchSizes, BlockCursors, BlockSpan, EpochOrder, Slots
from data_pipeline.packing.kinds.pairs import PairSpans, Pool, pair_spans
from data_pipeline.packing.sequences import PackingRules, stream
from data_pipeline.reading.corpus import CorpusSplit
from data_pipeline.reading.other_tokens import OtherRow, OtherStream, OtherView
from data_pipeline.shards.blocks import Block, joined
from data_pipeline.tokenization.tokenizer import Vocabulary


@dataclass(frozen=True)
class OpenPool:
    """The text of a pool, and its pairs as spans of it, block after block."""

    blocks: list[int]  # ascending
    counts: list[int]  # pairs in each block
    text: NDArray[np.integer]  # the concatenated streams of the blocks
    others: Mapping[str, OtherStream]  # the text by other tokenizers, by the name of the view
    spans: NDArray[np.int64]  # [5, pairs] the fields of `PairSpans`
    readable: NDArray[np.bool_]  # [pairs] True if both segments could be read

    def of_pairs(
        self, block: int, numbers: NDArray[np.int64]
    ) -> tuple[list[list[tuple[int, int]]], list[int], list[bool]]:
        """(start and length of both segments, label, readable) of these pairs of a block."""
        chosen = sum(self.counts[: self.blocks.index(block)]) + numbers
        *columns, labels = self.spans[:, chosen].tolist()
        first, second = (list(zip(*pair, strict=True)) for pair in (columns[:2], columns[2:]))
        segments = [[*both] for both in zip(first, second, strict=True)]
        return segments, labels, self.readable[chosen].tolist()


class Pools:
    """The open pools of one split. A pool stays open while a caller holds a reference to it."""

    def __init__(
        self,
        split: CorpusSplit,
        rules: PackingRules,
        seed: int,
        read: Callable[[int], Block | None],
        others: Callable[[Block], Mapping[str, OtherStream]],
    ) -> None:
        """`read` returns a block by its index number, or None for a block that is skipped.

        `others` reads it by other tokenizers.
        """
        self._split, self._rules, self._seed, self._read = split, rules, seed, read
        self._others = others
        self._counts = split.sequence_counts(rules).per_block
        self._open: WeakValueDictionary[tuple[int, int], OpenPool] = WeakValueDictionary()

    def of(self, order: EpochOrder, block: int) -> OpenPool:
        """The pool of a block, with its pairs in the epoch of `order`."""
        blocks = order.pool(block)
        key = (order.epoch, blocks[0])
        pool = self._open.get(key)
        if pool is None:
            pool = self._open[key] = self._pack(
                blocks, scalar_key(self._seed, key[0], TextDraw.PAIRS, key[1])
            )
        return pool

    def _pack(self, blocks: list[int], key: int) -> OpenPool:
        index = self._split.index
        bounds = [next(index.boundaries(number, number + 1)) for number in blocks]
        pairs = pair_spans(Pool(bounds, [*map(index.first_document, blocks)]), self._rules, key)
        sizes = [len(block.tokens) + len(block.documents) for block in bounds]
        read = [self._read(number) for number in blocks]
        is_read = np.array([block is not None for block in read])
        firsts, seconds = (
            np.searchsorted(np.cumsum(sizes), starts, side="right")
            for starts in (pairs.first_starts, pairs.second_starts)
        )
        return OpenPool(
            blocks,
            counts=[int(self._counts[number]) for number in blocks],
            text=np.concatenate(
                [self._stream(block, size) for block, size in zip(read, sizes, strict=True)]
            ),
            others=self._by_others(read, sizes),
            spans=np.stack([getattr(pairs, part.name) for part in fields(PairSpans)]),
            readable=is_read[firsts] & is_read[seconds],
        )

    def _by_others(
        self, blocks: Sequence[Block | None], sizes: Sequence[int]
    ) -> dict[str, OtherStream]:
        """The text by other tokenizers; of none where no block can be read."""
        streams = [None if block is None else self._others(block) for block in blocks]
        names = next((by_view.keys() for by_view in streams if by_view is not None), ())
        return {
            name: OtherStream.joined(
                [
                    OtherStream.unread(size) if by_view is None else by_view[name]
                    for by_view, size in zip(streams, sizes, strict=True)
                ]
            )
            for name in names
        }

    def _stream(self, block: Block | None, size: int) -> NDArray[np.integer]:
        if block is None:
            return np.zeros(size, np.uint16)
        return stream(block, self._split.vocabulary.sep)


_log = logging.getLogger(__name__)

SPARE_BLOCKS = 8
SOURCE_SHIFT = 48  # the sample ids of source n of a mixture begin at n << 48


@dataclass(frozen=True)
class Sequences:
    """R packed sequences before masking. Rows are filled in place."""

    input_ids: NDArray[np.int64]  # [R, L]
    segment_ids: NDArray[np.int64]  # [R, L]
    document_ids: NDArray[np.int64]  # [R, L] from 1 where a row holds several; else 0
    lengths: NDArray[np.int64]  # [R] tokens, special ones included
    pair_labels: NDArray[np.int64]  # [R]
    sample_ids: NDArray[np.int64]  # [R]
    epochs: NDArray[np.int64]  # [R]
    readable: NDArray[np.bool_]  # [R]
    others: Mapping[str, list[OtherRow]] = field(default_factory=dict)  # R of each view, by name

    @classmethod
    def empty(
        cls, rows: int, length: int, vocabulary: Vocabulary, views: Mapping[str, OtherView]
    ) -> Sequences:
        """Rows with a [CLS] and only padding after it."""
        input_ids = np.full((rows, length), vocabulary.pad, np.int64)
        input_ids[:, 0] = vocabulary.cls
        return cls(
            input_ids,
            segment_ids=np.zeros_like(input_ids),
            document_ids=np.zeros_like(input_ids),
            lengths=np.zeros(rows, np.int64),
            pair_labels=np.zeros(rows, np.int64),
            sample_ids=np.zeros(rows, np.int64),
            epochs=np.zeros(rows, np.int64),
            readable=np.ones(rows, bool),
            others={
                name: [OtherRow.unreadable(view.vocabulary)] * rows for name, view in views.items()
            },
        )


@dataclass(frozen=True)
class _OpenBlock:
    """A block in one epoch: its sequences in shuffled order, as spans of `text`."""

    span: BlockSpan
    sample_ids: list[int]
    readable: list[bool]
    text: NDArray[np.integer]
    rows: list[list[tuple[int, int]]]  # the start and length of each span of a sequence
    labels: list[int] | None = None  # of pairs
    others: Mapping[str, OtherStream] = field(default_factory=dict)  # as in `OpenPool`
    pool: OpenPool | None = None  # a reference that keeps the pool open for its other blocks


NO_BLOCK = _OpenBlock(BlockSpan(0, 0, 0, 0), [], [], np.zeros(0, np.uint16), [])


class Lanes:
    """Fills the given `rows` of global batches of `sizes` rows from one split."""

    def __init__(
        self,
        split: CorpusSplit,
        rules: PackingRules,
        seed: int,
        sizes: BatchSizes,
        rows: NDArray[np.int64],
        source: int,
        skip_bad_shards: bool,
        copies: int,
        views: Mapping[str, OtherView],
        first_epoch: int,
    ) -> None:
        """Pairs repeat after `copies` epochs; 0: never. `views` are by other tokenizers."""
        self._views, self._source = views, source
        self.counts = split.sequence_counts(rules)
        self.split, self._rules, self._seed = split, rules, seed
        self._rows, self._slots = rows, Slots(sizes, self.counts.total, first_epoch)
        self._first_sample = source << SOURCE_SHIFT
        self._skip_bad_shards, self._copies = skip_bad_shards, copies
        self._separates = rules.packing.separates_documents
        self._bad_shards: set[int] = set()
        self._pools = (
            Pools(split, rules, seed, self._read, self._by_others) if rules.is_pair else None
        )
        self._cursors = BlockCursors(self.counts, seed, len(rows))
        self._blocks: OrderedDict[tuple[int, int], _OpenBlock] = OrderedDict()
        self._max_blocks = min(len(rows), len(split.index.blocks)) + SPARE_BLOCKS
        self._lanes: list[_OpenBlock] = [NO_BLOCK] * len(rows)

    def fill(self, step: int, out: Sequences, at: NDArray[np.int64]) -> None:
        """Write these rows of step `step` into the rows `at` of `out`."""
        epochs, positions = self._slots.locate(step, self._rows)
        self._move(epochs, positions)
        out.epochs[at] = epochs
        within = (positions - self._cursors.starts).tolist()
        out.sample_ids[at] = [
            lane.sample_ids[number] for lane, number in zip(self._lanes, within, strict=True)
        ]
        for row, lane, number in zip(at.tolist(), self._lanes, within, strict=True):
            if lane.readable[number]:
                self._fill_row(out, row, lane, number)
            else:
                self._fill_unreadable(out, row)

    def samples(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(epochs [R], sample ids [R]) of these rows at a step, without reading token data."""
        epochs, positions = self._slots.locate(step, self._rows)
        sample_ids = np.empty_like(positions)
        for row, (epoch, position) in enumerate(
            zip(epochs.tolist(), positions.tolist(), strict=True)
        ):
            order = self._cursors.order(epoch)
            span = order.span(position)
            number = order.within_block(span)[position - span.first_position]
            sample_ids[row] = self._first_sample + span.first_sample + number
        return epochs, sample_ids

    def _fill_row(self, out: Sequences, row: int, lane: _OpenBlock, number: int) -> None:
        vocabulary, ids, end = self.split.vocabulary, out.input_ids[row], 1
        for nth, (start, length) in enumerate(lane.rows[number]):
            begin = end + 1 if self._separates and nth else end
            end = begin + length + 1
            ids[begin : end - 1] = lane.text[start : start + length]
            ids[end - 1] = vocabulary.sep
            if self._separates:
                ids[begin - 1] = vocabulary.cls
                out.document_ids[row, begin - 1 : end] = nth + 1
            elif nth:
                out.segment_ids[row, begin:end] = nth
        out.lengths[row] = end
        if lane.labels is not None:
            out.pair_labels[row] = lane.labels[number]
        for name, view in self._views.items():
            read = lane.others[name], lane.rows[number]
            out.others[name][row] = OtherRow.of(*read, view, self._separates)

    def _fill_unreadable(self, out: Sequences, row: int) -> None:
        """Fill a row with [CLS] [SEP]: nothing to mask, but something to attend to."""
        out.input_ids[row, 1] = self.split.vocabulary.sep
        out.document_ids[row, :2] = 1
        out.lengths[row] = 2
        out.pair_labels[row] = NO_LABEL
        out.readable[row] = False

    def blocks_entered(self, steps: Iterable[int]) -> Iterator[list[int]]:
        """Yield the blocks that rows begin to read at each step, pools included.

        Does not read token data.
        """
        cursors = BlockCursors(self.counts, self._seed, len(self._rows))
        for step in steps:
            moves = cursors.advance(*self._slots.locate(step, self._rows))
            entered = [self._needed(cursors, epoch, span.block) for _, epoch, span in moves]
            yield [block for needed in entered for block in needed]

    def _needed(self, cursors: BlockCursors, epoch: int, block: int) -> list[int]:
        """The blocks that must be read for the sequences of one block."""
        if self._pools:
            return cursors.order(self._copy(epoch)).pool(block)
        return [*self.split.together(block, self._rules)]

    def _copy(self, epoch: int) -> int:
        """The epoch whose pairs this epoch repeats; itself without `copies`."""
        return epoch % self._copies if self._copies else epoch

    def _move(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Open the next block for every row that has left its current one."""
        for row, epoch, span in self._cursors.advance(epochs, positions):
            self._lanes[row] = self._open(epoch, span)

    def _open(self, epoch: int, span: BlockSpan) -> _OpenBlock:
        key = (epoch, span.block)
        if key not in self._blocks:
            self._blocks[key] = self._pack(span, epoch)
            if len(self._blocks) > self._max_blocks:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(key)
        return self._blocks[key]

    def _warn(self, error: BadShard, shard: int) -> None:
        """Log the fault of a shard once."""
        if shard not in self._bad_shards:
            self._bad_shards.add(shard)
            _log.warning("%s: its unreadable sequences are trained on without labels", error)

    def _pack(self, span: BlockSpan, epoch: int) -> _OpenBlock:
        shuffled = self._cursors.order(epoch).within_block(span)
        sample_ids = (self._first_sample + span.first_sample + shuffled).tolist()
        if self._pools:
            pool = self._pools.of(self._cursors.order(self._copy(epoch)), span.block)
            rows, labels, readable = pool.of_pairs(span.block, shuffled)
            of_pool = readable, pool.text, rows, labels, pool.others, pool
            return _OpenBlock(span, sample_ids, *of_pool)
        unread = replace(NO_BLOCK, span=span, sample_ids=sample_ids)
        read = [self._read(number) for number in self.split.together(span.block, self._rules)]
        blocks = [block for block in read if block is not None]
        if len(blocks) < len(read):
            return replace(unread, readable=[False] * span.count)
        block = joined(blocks)
        return replace(
            unread,
            readable=[True] * span.count,
            text=stream(block, self.split.vocabulary.sep),
            rows=self._rules.spans(block).of_rows(shuffled),
            others=self._by_others(block),
        )

    def _by_others(self, block: Block) -> dict[str, OtherStream]:
        """The text of a block in each view by another tokenizer."""
        return {
            name: OtherStream.of(block, view.numbers[self._source], view.vocabulary.sep)
            for name, view in self._views.items()
        }

    def _read(self, number: int) -> Block | None:
        """A block; None if it cannot be read and bad shards are skipped."""
        try:
            return self.split.read_block(number)
        except BadShard as error:
            if not self._skip_bad_shards:
                raise error.ending_a_job() from None
            self._warn(error, self.split.index.shard_of(number))
            return None
