"""The stream of batches that one rank trains on: a pure function of the step."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline import packing
from data_pipeline.batches import Batch
from data_pipeline.config import DataConfig
from data_pipeline.corpus import CorpusSplit
from data_pipeline.errors import DataError
from data_pipeline.masking import capacity, mask_tokens
from data_pipeline.order import EpochOrder, Stretch, locate

SPARE_BLOCKS = 8  # kept beside one for each row


@dataclass(frozen=True)
class _OpenBlock:
    """A packed block, its sequences in the shuffled order of one epoch."""

    stretch: Stretch
    stream: NDArray[np.integer]  # [tokens + documents]
    starts: list[int]
    lengths: list[int]
    sample_ids: list[int]


class BatchStream:
    """Batches of the rows that `rank` owns: [rank * R, (rank + 1) * R) of the global batch.

    Memory: about 1.1 MiB for each of the rank's rows (its current block), at most one for each
    block of the split. Raises DataError when the global batch does not divide by the world size,
    the split has fewer samples than there are ranks, or not a single full sequence.
    """

    def __init__(
        self,
        split: CorpusSplit,
        config: DataConfig,
        seed: int,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if global_batch_size % world_size:
            raise DataError(
                f"global batch size: {global_batch_size} rows do not divide by {world_size} ranks"
            )
        self.split, self.config, self.seed = split, config, seed
        self.global_batch_size = global_batch_size
        self.counts = split.sequence_counts(config.packing, config.sequence_length)
        _require_samples(split, config, self.counts.total, world_size)
        rows = global_batch_size // world_size
        self._rows = np.arange(rank * rows, (rank + 1) * rows)
        self._orders: OrderedDict[int, EpochOrder] = OrderedDict()
        self._blocks: OrderedDict[tuple[int, int], _OpenBlock] = OrderedDict()
        self._lanes: list[_OpenBlock | None] = [None] * rows
        self._lane_epochs = np.full(rows, -1)
        self._lane_starts = np.zeros(rows, np.int64)
        self._lane_ends = np.zeros(rows, np.int64)

    @property
    def samples_per_epoch(self) -> int:
        """Sequences that the split makes."""
        return self.counts.total

    @property
    def capacity(self) -> int:
        """M, the number of slots for masked positions in each row."""
        return capacity(self.config.sequence_length, self.config.masking)

    def batch(self, step: int) -> Batch:
        """The rank's rows of global step `step` (from 0)."""
        epochs, positions = locate(step, self._rows, self.global_batch_size, self.counts.total)
        self._move_lanes(epochs, positions)
        input_ids, lengths, sample_ids = self._fill((positions - self._lane_starts).tolist())
        masked = mask_tokens(
            input_ids, epochs, sample_ids, self.seed, self.config.masking, self.split.vocabulary
        )
        columns = np.arange(self.config.sequence_length)
        return Batch(
            input_ids=masked.input_ids,
            segment_ids=np.zeros_like(input_ids),
            attention_mask=(columns < lengths[:, None] + packing.SPECIALS).astype(np.int64),
            masked_positions=masked.positions,
            masked_labels=masked.labels,
            pair_labels=None,
            sample_ids=sample_ids,
            epochs=epochs,
        )

    def _move_lanes(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Open the next block for every lane that has left its current one."""
        stale = (
            (epochs != self._lane_epochs)
            | (positions < self._lane_starts)
            | (positions >= self._lane_ends)
        )
        for row in np.flatnonzero(stale):
            block = self._open(int(epochs[row]), int(positions[row]))
            self._lanes[row] = block
            self._lane_epochs[row] = epochs[row]
            self._lane_starts[row] = block.stretch.first_position
            self._lane_ends[row] = block.stretch.first_position + block.stretch.count

    def _open(self, epoch: int, position: int) -> _OpenBlock:
        order = self._order(epoch)
        stretch = order.stretch(position)
        key = (epoch, stretch.block)
        if key not in self._blocks:
            self._blocks[key] = self._pack(order, stretch)
            if len(self._blocks) > len(self._rows) + SPARE_BLOCKS:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(key)
        return self._blocks[key]

    def _order(self, epoch: int) -> EpochOrder:
        if epoch not in self._orders:
            self._orders[epoch] = EpochOrder(self.counts, self.seed, epoch)
            if len(self._orders) > 2:
                self._orders.popitem(last=False)
        return self._orders[epoch]

    def _pack(self, order: EpochOrder, stretch: Stretch) -> _OpenBlock:
        block = self.split.read_block(stretch.block)
        spans = packing.spans(block, self.config.packing, self.config.sequence_length)
        shuffled = order.within_block(stretch)
        return _OpenBlock(
            stretch=stretch,
            stream=packing.stream(block, self.split.vocabulary.sep),
            starts=spans.starts[shuffled].tolist(),
            lengths=spans.lengths[shuffled].tolist(),
            sample_ids=(stretch.first_sample + shuffled).tolist(),
        )

    def _fill(
        self, within: list[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Unmasked sequences: input_ids [R, L], text lengths [R], sample ids [R]."""
        vocabulary = self.split.vocabulary
        rows = len(self._rows)
        input_ids = np.full((rows, self.config.sequence_length), vocabulary.pad, np.int64)
        lengths = np.empty(rows, np.int64)
        sample_ids = np.empty(rows, np.int64)
        for row, (block, number) in enumerate(zip(self._lanes, within, strict=True)):
            assert block is not None
            start, length = block.starts[number], block.lengths[number]
            input_ids[row, 1 : length + 1] = block.stream[start : start + length]
            lengths[row] = length
            sample_ids[row] = block.sample_ids[number]
        input_ids[:, 0] = vocabulary.cls
        input_ids[np.arange(rows), lengths + 1] = vocabulary.sep
        return input_ids, lengths, sample_ids


def _require_samples(split: CorpusSplit, config: DataConfig, total: int, world_size: int) -> None:
    tokens = split.index.tokens + packing.SPECIALS
    if tokens < config.sequence_length:
        raise DataError(
            f"{split.folder}: {tokens} tokens do not make a single full sequence at "
            f"sequence_length {config.sequence_length}"
        )
    if total < world_size:
        raise DataError(
            f"{split.folder}: {total} samples are too few for {world_size} ranks; "
            "use fewer ranks or more text"
        )
