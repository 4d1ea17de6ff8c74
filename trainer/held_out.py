"""Held-out evaluation: the same masked sequences for everyone, and the unigram baseline.

The evaluated sequences are the first rows of the validation split's own stream, masked once and
for all: the same at every evaluation, for every learner and on any number of ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline import Batch, BatchStream, Corpus
from trainer.batches import MicroBatch, to_micro_batches
from trainer.config import JobConfig
from trainer.state import HeldOut

# The masks of held-out text do not depend on the job's seed, so that jobs can be compared.
SEED = 0
# Rows that are read at once, on all ranks together.
ROWS = 64
NO_LABEL = -100

Scorer = Callable[[MicroBatch], tuple[Tensor, Tensor]]  # -> summed loss, right predictions


def evaluate(
    score: Scorer, batches: Iterable[Batch], micro_batch: int, device: torch.device
) -> HeldOut:
    """Mean loss and accuracy over this rank's `batches` and every other rank's. Collective."""
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in batches:
        sums[2] += int((batch.masked_labels >= 0).sum())
        for micro in to_micro_batches(batch, micro_batch, device):
            sums[:2] += torch.stack(score(micro))
    if dist.is_initialized():
        dist.all_reduce(sums)
    loss, correct, count = sums.tolist()
    return HeldOut(loss / count, correct / count)


class ValidationSet:
    """The held-out sequences of a job, as any number of ranks share them."""

    def __init__(self, corpus: Corpus, config: JobConfig) -> None:
        """Raise DataError when the corpus has no validation split."""
        split = corpus.split("val")
        total = BatchStream(split, config.data, SEED, 1).samples_per_epoch
        rows = min(ROWS, total, config.evaluation.sequences)
        self._stream = BatchStream(split, config.data, SEED, rows)
        self._steps = min(config.evaluation.sequences, total) // rows
        self._token_counts = corpus.token_counts  # [V] int64, of the training split

    def batches(self, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """This rank's share. Over all ranks each sequence is scored once; all ranks get as many
        rows, since their forward passes are collective."""
        for step in range(self._steps):
            yield _share(self._stream.batch(step), rank, world_size)

    def unigram(self) -> HeldOut:
        """What predicting every masked token from training frequencies alone scores.

        One is added to every count, so that no loss is infinite.
        """
        labels = np.concatenate([batch.masked_labels.ravel() for batch in self.batches()])
        labels = labels[labels >= 0]
        smoothed = self._token_counts.astype(np.float64) + 1
        nats = -np.log(smoothed / smoothed.sum())  # [V]
        accuracy = (labels == self._token_counts.argmax()).mean()
        return HeldOut(float(nats[labels].mean()), float(accuracy))


def _share(batch: Batch, rank: int, world_size: int) -> Batch:
    """An equal share of the rows; those past the end repeat others, without labels."""
    total = len(batch.input_ids)
    size = -(-total // world_size)
    rows = np.arange(rank * size, (rank + 1) * size)
    share = batch.take(rows % total)
    labels = np.where((rows >= total)[:, None], NO_LABEL, share.masked_labels)
    return dataclasses.replace(share, masked_labels=labels)
