"""The order of a task's examples, and reading those of a split in padded batches.

An epoch shuffles the blocks, and cuts them into pools of `POOL_BLOCKS`. The examples of a pool are
shuffled, taken `WINDOW` batches at a time, and sorted by length within such a window. Each batch is
then a run of examples of about one length, and the batches of a window come in a shuffled order.
The batches are those of the job: they begin where its steps do, and the examples in front of the
first whole batch of a pool, and behind its last, stay unsorted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import BadShard, DataError
from data_pipeline.examples.example import SEVERAL, TOKENS, WHOLE, Layout, View, with_masks
from data_pipeline.examples.storing import columns_file, ends_file, target_file
from data_pipeline.hashing import ExampleDraw, permutation, scalar_key
from data_pipeline.masking.masker import NO_LABEL
from data_pipeline.order import BatchSizes
from data_pipeline.reading.batches import MASKED, Batch, Target, filled
from data_pipeline.reading.corpus import Corpus, CorpusSplit
from data_pipeline.shards import manifest
from data_pipeline.shards.blocks import offsets
from data_pipeline.shards.index import Index, map_array
from data_pipeline.tokenization.tokenizer import Vocabulary

POOL_BLOCKS = 64  # about 32 million tokens: most tasks are one pool
WINDOW = 50  # batches, as many as `transformers` sorts together


class ExampleTable:
    """Where each example of a split is, and how long: from the index alone.

    Examples are numbered in the order in which they were written.
    """

    def __init__(self, index: Index, segments_per_example: int, measured: int) -> None:
        """The first `measured` segments of an example say how long it is."""
        blocks = index.blocks
        self.first_example = offsets(blocks["documents"])  # [blocks + 1]
        self.first_token = offsets(blocks["tokens"])  # [blocks + 1]
        self._segments, self._measured = segments_per_example, measured
        self._sizes = index.sentence_sizes

    @property
    def total(self) -> int:
        """The number of examples."""
        return int(self.first_example[-1])

    def segment_sizes(self, first: int, last: int) -> NDArray[np.int64]:
        """The tokens of each segment [last - first, segments] of these examples."""
        wanted = self._sizes[first * self._segments : last * self._segments]
        return wanted.astype(np.int64).reshape(-1, self._segments)

    def lengths(self, first: int, last: int) -> NDArray[np.int64]:
        """The tokens of these examples [last - first]."""
        return self.segment_sizes(first, last)[:, : self._measured].sum(axis=1)


class ExampleOrder:
    """Which example stands at a position of an epoch."""

    def __init__(self, table: ExampleTable, seed: int, sizes: BatchSizes) -> None:
        self._table, self._seed, self._batches = table, seed, sizes
        self._pool = lru_cache(maxsize=2)(self._ordered)

    def examples(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The examples [R] at these positions [R] of an epoch, by number."""
        numbers = np.empty_like(positions)
        ends = np.cumsum([int(self._counts[blocks].sum()) for blocks in self._blocks(epoch)])
        pools = np.searchsorted(ends, positions, side="right")
        for pool in np.unique(pools).tolist():
            first = int(ends[pool - 1]) if pool else 0
            numbers[pools == pool] = self._pool(epoch, pool, first)[
                positions[pools == pool] - first
            ]
        return numbers

    @cached_property
    def _counts(self) -> NDArray[np.int64]:
        return np.diff(self._table.first_example)

    def _blocks(self, epoch: int) -> list[NDArray[np.int64]]:
        shuffled = permutation(scalar_key(self._seed, epoch, ExampleDraw.BLOCKS), len(self._counts))
        return [shuffled[at : at + POOL_BLOCKS] for at in range(0, len(shuffled), POOL_BLOCKS)]

    def _ordered(self, epoch: int, number: int, first: int) -> NDArray[np.int64]:
        """The examples of a pool that begins at position `first`, in order."""
        starts, blocks = self._table.first_example, self._blocks(epoch)[number]
        spans = [(int(starts[block]), int(starts[block + 1])) for block in blocks]
        examples = np.concatenate([np.arange(*span) for span in spans])
        lengths = np.concatenate([self._table.lengths(*span) for span in spans])
        shuffled = permutation(
            scalar_key(self._seed, epoch, ExampleDraw.EXAMPLES, number), len(examples)
        )
        slot = epoch * self._table.total + first
        step = self._batches.step_of(slot)
        size, begin = self._batches.at(step), self._batches.before(step)
        head = min(-(slot - begin) % size, len(shuffled))
        batches = (len(shuffled) - head) // size
        key = scalar_key(self._seed, epoch, ExampleDraw.BATCHES, number)
        middle = _by_length(shuffled[head : head + batches * size], lengths, size, key)
        order = np.concatenate([shuffled[:head], middle, shuffled[head + batches * size :]])
        return examples[order]


def _by_length(
    shuffled: NDArray[np.int64], lengths: NDArray[np.int64], size: int, key: int
) -> NDArray[np.int64]:
    """Whole batches of `size`, each of examples of about one length."""
    windows = []
    for at in range(0, len(shuffled), WINDOW * size):
        window = shuffled[at : at + WINDOW * size]
        by_length = window[np.argsort(lengths[window], kind="stable")].reshape(-1, size)
        windows.append(by_length[permutation(scalar_key(key, at), len(by_length))].ravel())
    return np.concatenate([shuffled[:0], *windows])


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Row:
    """An example as it stands in its block."""

    number: int
    segments: list[NDArray[np.integer]]
    first_token: int  # of its tokens, in the whole split
    readable: bool = True


class ExampleSplit:
    """The examples of a split of a corpus that `store_examples` wrote. Not for several threads."""

    def __init__(
        self,
        corpus: Corpus,
        split: str,
        skip_bad_shards: bool = False,
        views: Mapping[str, View] | None = None,
    ) -> None:
        """Raise DataError when the corpus holds text, or the split nothing.

        `views` are to be in every batch, by name; their targets are those of the whole examples,
        besides what they mask.
        """
        self._split: CorpusSplit = corpus.split(split)
        by_all = layout_of(corpus, split)
        self.layout = by_all.first
        self.vocabulary = corpus.vocabulary
        segments = sum(by_all.segments), sum(self.layout.segments)
        self.table = ExampleTable(self._split.index, *segments)
        self._targets = {
            name: map_array(corpus.folder / target_file(split, name))
            for name in self.layout.targets
        }
        self._ends = {
            name: map_array(corpus.folder / ends_file(split, name))
            for name, kind in self.layout.targets.items()
            if kind == SEVERAL
        }
        self.columns: NDArray[np.float64] | None = None  # [examples, columns of the layout]
        if self.layout.columns:
            stored = map_array(corpus.folder / columns_file(split))
            self.columns = stored.reshape(-1, len(self.layout.columns))
        self._views = views or {}
        # Of functions and not of methods, so that no split refers to itself: it is freed with its
        # blocks as soon as nobody holds it.
        kept = POOL_BLOCKS + 1  # a batch may straddle two pools
        self._bounds = lru_cache(kept)(partial(_bounds, self.table))
        self._tokens = lru_cache(kept)(partial(_tokens, self._split, skip_bad_shards))

    @property
    def total(self) -> int:
        """The number of examples."""
        return self.table.total

    def labels(self, target: str) -> NDArray[Any]:
        """All values of a target: of every example, of every token, or all that there are."""
        return self._targets[target]

    def batch(self, numbers: NDArray[np.int64], epochs: NDArray[np.int64]) -> Batch:
        """The examples with these numbers [R], padded to the longest sequence among them.

        Their arrays are [R, L], or [R, C, L] where an example has C > 1 sequences.
        """
        rows = [self._row(int(number)) for number in numbers]
        batch = self._batch(rows, self.layout, self.vocabulary, numbers, epochs)
        views = {
            name: self._view(view, rows, numbers, epochs) for name, view in self._views.items()
        }
        return replace(batch, views=views)

    def predicted_tokens(self) -> int:
        """How many tokens of all examples are to be predicted (`EncodedExample.predicted`)."""
        if self.layout.predicted is None:
            return 0
        sizes = self.table.segment_sizes(0, self.total)
        first = sum(self.layout.segments[: self.layout.predicted])
        predicted = sizes[:, first : first + self.layout.segments[self.layout.predicted]]
        return int(predicted.sum()) + predicted.size  # and a [SEP] behind each segment

    def _view(
        self, view: View, rows: list[_Row], numbers: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> Batch:
        vocabulary = self.vocabulary if view.corpus is None else view.corpus.vocabulary
        arranged = _arranged(rows, self.layout, view.sequences)
        batch = self._batch(*arranged, vocabulary, numbers, epochs)
        if view.masks is None:
            return batch
        return with_masks(batch, view.masks, vocabulary.mask)

    def _batch(
        self,
        rows: list[_Row],
        layout: Layout,
        vocabulary: Vocabulary,
        numbers: NDArray[np.int64],
        epochs: NDArray[np.int64],
    ) -> Batch:
        sheet = _Sheet.of(rows, layout, vocabulary)
        input_ids, segment_ids, mask = sheet.filled(vocabulary.pad)
        targets = {name: self._target(name, rows, sheet) for name in layout.targets}
        if layout.predicted is not None:
            unreadable = np.array([not row.readable for row in rows])
            targets[MASKED] = sheet.predicted(layout.predicted).without(unreadable)
        return Batch(
            input_ids=input_ids,
            segment_ids=segment_ids,
            attention_mask=mask,
            targets=targets,
            sample_ids=numbers,
            epochs=epochs,
            readable=np.array([row.readable for row in rows]),
            is_trimmed=True,
            numbers=None if self.columns is None else np.array(self.columns[numbers]),
        )

    def _row(self, number: int) -> _Row:
        table = self.table
        block = int(np.searchsorted(table.first_example, number, side="right")) - 1
        starts, sizes = self._bounds(block)
        within = number - int(table.first_example[block])
        start, tokens = int(starts[within]), self._tokens(block)
        if tokens is None:
            return _Row(number, [np.zeros(0, np.uint16)] * sizes.shape[1], 0, readable=False)
        ends = start + np.cumsum(sizes[within])
        segments = [
            tokens[end - size : end]
            for end, size in zip(ends.tolist(), sizes[within].tolist(), strict=True)
        ]
        return _Row(number, segments, int(table.first_token[block]) + start)

    def _several(self, name: str, row: _Row) -> NDArray[Any]:
        """The values of an example, none where it cannot be read."""
        ends = self._ends[name]
        first = int(ends[row.number - 1]) if row.number else 0
        return self._targets[name][first : int(ends[row.number]) if row.readable else first]

    def _target(self, name: str, rows: list[_Row], sheet: _Sheet) -> Target:
        values = self._targets[name]
        if self.layout.targets[name] == WHOLE:
            is_number = name in self.layout.numbers
            dtype: Any = np.float32 if is_number else np.int64
            target = Target(values[[row.number for row in rows]].astype(dtype))
            return target.without(np.array([not row.readable for row in rows]))
        if self.layout.targets[name] == SEVERAL:
            return Target(filled([self._several(name, row) for row in rows], NO_LABEL))
        assert self.layout.targets[name] == TOKENS
        return sheet.token_target(rows, values)


def _bounds(table: ExampleTable, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each example [E] of a block begins in it, and its segments' sizes [E, segments]."""
    sizes = table.segment_sizes(*table.first_example[block : block + 2].tolist())
    lengths = sizes.sum(axis=1)
    return np.cumsum(lengths) - lengths, sizes


def _tokens(split: CorpusSplit, skip_bad_shards: bool, block: int) -> NDArray[np.integer] | None:
    """The tokens of a block; None if it cannot be read and bad shards are skipped."""
    try:
        return split.read_block(block).tokens
    except BadShard as error:
        if not skip_bad_shards:
            raise error.ending_a_job() from None
        _log.warning("%s: its unreadable examples are trained on without labels", error)
        return None


@dataclass(frozen=True)
class _Sheet:
    """The sequences of some rows side by side: [R, C, L] ids, with the column of every token."""

    shape: tuple[int, int, int]
    ids: list[list[NDArray[np.integer]]]  # by row and sequence, special tokens included
    second: list[list[int]]  # the columns where the second segments begin
    columns: list[NDArray[np.int64]]  # of every ordinary token of a row, into C * L

    @classmethod
    def of(cls, rows: list[_Row], layout: Layout, vocabulary: Vocabulary) -> _Sheet:
        ids, second, starts = [], [], []
        for row in rows:
            sequences: list[NDArray[np.integer]] = []
            seconds: list[int] = []
            places: list[tuple[int, int, int]] = []
            at = 0
            for count in layout.segments:
                segments = row.segments[at : at + count]
                at += count
                sequence, begins = vocabulary.with_special(segments)
                for column, segment in zip(begins, segments, strict=True):
                    places.append((len(sequences), column, len(segment)))
                sequences.append(sequence)
                seconds.append(begins[1] if count == 2 else len(sequence))
            ids.append(sequences)
            second.append(seconds)
            starts.append(places)
        longest = max(len(sequence) for sequences in ids for sequence in sequences)
        columns = [
            np.concatenate([np.arange(size) + c * longest + at for c, at, size in places])
            for places in starts
        ]
        return cls((len(rows), len(layout.segments), longest), ids, second, columns)

    def filled(self, pad: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Ids, segment ids and attention mask, [R, L] where there is one sequence."""
        ids = np.full(self.shape, pad, np.int64)
        segment_ids, mask = np.zeros((2, *self.shape), np.int64)
        for row, sequences in enumerate(self.ids):
            for number, sequence in enumerate(sequences):
                ids[row, number, : len(sequence)] = sequence
                mask[row, number, : len(sequence)] = 1
                segment_ids[row, number, self.second[row][number] : len(sequence)] = 1
        if self.shape[1] == 1:
            return ids[:, 0], segment_ids[:, 0], mask[:, 0]
        return ids, segment_ids, mask

    def token_target(self, rows: list[_Row], values: NDArray[Any]) -> Target:
        """The labels of the tokens that have one, [R, M], with their columns."""
        labelled = []
        for row, columns in zip(rows, self.columns, strict=True):
            labels = values[row.first_token : row.first_token + len(columns)].astype(np.int64)
            chosen = labels != NO_LABEL
            labelled.append((labels[chosen], columns[chosen]))
        return Target.of_rows(labelled)

    def predicted(self, number: int) -> Target:
        """The tokens of a sequence but its first, [R, M], with their columns."""
        first = number * self.shape[2]
        labels = [sequences[number][1:] for sequences in self.ids]
        return Target.of_rows([(ids, first + 1 + np.arange(len(ids))) for ids in labels])


def _arranged(
    rows: list[_Row], layout: Layout, sequences: Sequence[Sequence[int]]
) -> tuple[list[_Row], Layout]:
    """Rows of sequences with these segments of each row, and the layout that they have."""
    assert set(layout.targets.values()) == {WHOLE}, "a view with labels of parts"
    numbers = [number for sequence in sequences for number in sequence]
    chosen = [replace(row, segments=[row.segments[number] for number in numbers]) for row in rows]
    segments = tuple(len(sequence) for sequence in sequences)
    return chosen, replace(layout, segments=segments, predicted=None)


def layout_of(corpus: Corpus, split: str) -> Layout:
    """The layout of a split of a corpus of examples; DataError where it holds text, or nothing."""
    layouts = manifest.read(corpus.folder)["tally"].get("examples")
    if layouts is None:
        raise DataError(f"{corpus.name}: holds text, not the examples of a task")
    if split not in layouts:
        raise DataError(f"{corpus.name}: has no examples in {split}")
    return Layout.from_json(layouts[split])
