"""Labelled examples that fit into memory: as one batch, and in a shuffled order for training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.hashing import permutation, scalar_key
from data_pipeline.order.slots import BatchSizes
from data_pipeline.reading.batches import Batch, Target
from data_pipeline.tokenization.tokenizer import load

EXAMPLES = 4  # what a shuffle is of; part of its key (see `data_pipeline.order.epoch`)


def read_lines(path: Path) -> list[str]:
    """The lines of a text file; DataError where it cannot be read, or has none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not lines:
        raise DataError(f"{path}: is empty")
    return lines


def encode_texts(
    texts: Sequence[str], targets: Mapping[str, Target], tokenizer_dir: Path, length: int
) -> Batch:
    """Single texts as ``[CLS] text [SEP]``, cut off at `length`, all of them as one batch."""
    tokenizer, vocabulary = load(tokenizer_dir)
    input_ids = np.full((len(texts), length), vocabulary.pad, np.int64)
    attention_mask = np.zeros((len(texts), length), np.int64)
    for row, text in enumerate(texts):
        tokens = tokenizer.encode(text, add_special_tokens=False).ids[: length - 2]
        ids = [vocabulary.cls, *tokens, vocabulary.sep]
        input_ids[row, : len(ids)] = ids
        attention_mask[row, : len(ids)] = 1
    return Batch(
        input_ids=input_ids,
        segment_ids=np.zeros_like(input_ids),
        attention_mask=attention_mask,
        targets=targets,
        sample_ids=np.arange(len(texts)),
        epochs=np.zeros(len(texts), np.int64),
    )


class ExampleStream:
    """A rank's rows of every global batch: a pure function of (examples, seed, step).

    Every example comes once in an epoch; a batch may straddle two.
    """

    def __init__(
        self, examples: Batch, seed: int, sizes: BatchSizes, rank: int = 0, world_size: int = 1
    ) -> None:
        """Raise DataError when there are no examples, or a batch does not divide by the ranks."""
        self._examples, self._seed, self._sizes = examples, seed, sizes
        self._rank, self._world_size = rank, world_size
        self.samples_per_epoch = len(examples.sample_ids)
        if not self.samples_per_epoch:
            raise DataError("there are no examples to train on")
        if any(size % world_size for size in sizes.sizes):
            raise DataError(f"batch.size: must divide by {world_size} ranks")

    def batch(self, step: int) -> Batch:
        """The rank's rows of global step `step` (from 0)."""
        rows = self._sizes.at(step) // self._world_size
        mine = np.arange(self._rank * rows, (self._rank + 1) * rows)
        epochs, positions = np.divmod(self._sizes.before(step) + mine, self.samples_per_epoch)
        chosen = np.empty_like(positions)
        for epoch in np.unique(epochs):
            order = permutation(
                scalar_key(self._seed, int(epoch), EXAMPLES), self.samples_per_epoch
            )
            chosen[epochs == epoch] = order[positions[epochs == epoch]]
        return replace(self._examples.take(chosen), epochs=epochs)
