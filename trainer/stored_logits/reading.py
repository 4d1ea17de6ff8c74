"""Reading a rank's rows of stored logits, and drawing the tokens that are stored.

The k largest logits alone are a biased target: the tokens that they leave out get no probability.
The share of each token among draws from the distribution has its probability as expectation, and
so has every loss that is linear in the target (random sampling distillation, arXiv 2503.16870).
Here one token is drawn from each n-th part of the distribution, in the order of the vocabulary:
the expectation is that of independent draws, and the variance is never larger.
"""

import contextlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from data_pipeline import MASKED, Batch, StoredLogits
from data_pipeline.hashing import TeacherDraw, array_keys, random_uint32, scalar_key
from data_pipeline.shards.blocks import offsets
from data_pipeline.shards.manifest import sha256
from trainer.errors import TrainingError
from trainer.stored_logits.format import KEY, Manifest, Shard, ShardRecord, StepLogits

_ONE = 2.0**40  # a probability of 1 as a whole number: sums are exact in any order


def uniforms(
    seed: int,
    epochs: NDArray[np.int64],
    sample_ids: NDArray[np.int64],
    columns: NDArray[np.int64],
    samples: int,
) -> NDArray[np.float64]:
    """Numbers in (0, 1) for the draws [P, samples] at P positions: a hash of what they are for.

    epochs, sample_ids, columns: of each position, [P].
    """
    keys = array_keys(scalar_key(seed, TeacherDraw.TOKENS), epochs, sample_ids)
    counters = columns[:, None] * samples + np.arange(samples)
    return (random_uint32(keys, counters) + 0.5) / 2**32


def draw(logits: Tensor, numbers: Tensor, temperature: float) -> Tensor:
    """Tokens drawn from softmax(logits / T), ascending in each row: int64 [P, samples].

    logits: [P, V]; numbers: in (0, 1), float64 [P, samples].
    """
    weights = ((logits.double() / temperature).softmax(dim=1) * _ONE).round().long()
    ends = weights.cumsum(dim=1)
    samples = numbers.shape[1]
    parts = (torch.arange(samples, device=logits.device) + numbers) / samples
    return torch.searchsorted(ends, (parts * ends[:, -1:]).long(), right=True)


def as_logits(tokens: Tensor, temperature: float) -> Tensor:
    """Logits of drawn tokens [P, samples] whose softmax at T is each token's share: float32.

    A token that was drawn several times has the same logit in each place.
    """
    counts = (tokens[:, :, None] == tokens[:, None, :]).sum(dim=2)
    return temperature * counts.float().log()


class StoredReader:
    """One rank's rows of the batches in a folder, whose manifest fits the job."""

    def __init__(self, folder: Path, rank: int, world_size: int, temperature: float = 1.0) -> None:
        """`temperature` is that at which tokens were drawn, if they were.

        Raises TrainingError where the folder has no usable manifest.
        """
        self._folder, self._share, self._temperature = folder, (rank, world_size), temperature
        self._manifest = Manifest.load(folder)
        self._open: tuple[ShardRecord, Shard] | None = None

    def read(self, number: int, batch: Batch) -> StoredLogits:
        """The logits for the masked positions of `batch`, this rank's rows of the batch `number`.

        Raises TrainingError where a shard is missing or damaged, or was written for other masks.
        """
        if self._manifest.by_example:
            stored = self._of_examples(batch.sample_ids.tolist(), self._place(number))
        else:
            record, shard = self._shard(number)
            stored = shard.step(number - record.first, *self._share)
        if stored.values is None:
            assert stored.ids is not None
            drawn = stored.ids.to(torch.int64)
            stored = replace(stored, values=as_logits(drawn, self._temperature), ids=drawn)
        return _in_slots(stored, _labelled(batch), batch.readable, self._place(number))

    def _of_examples(self, examples: Iterable[int], place: str) -> StepLogits:
        shards, firsts, row_of = self._rows
        parts = []
        for example in examples:
            row = int(row_of[example]) if example < len(row_of) else -1
            if row < 0:
                raise TrainingError(f"{place}: example {example} is not stored; store it")
            shard = bisect_right(firsts, row) - 1
            parts.append(shards[shard].row(row - firsts[shard]))
        return StepLogits.joined(parts)

    @cached_property
    def _rows(self) -> tuple[list[Shard], list[int], NDArray[np.int64]]:
        """The shards, the number of each one's first row, and each example's row; -1: it has none.

        Rows are counted through all shards: a table may have 10 million, and each rank has these.
        """
        shards = [self._checked(record) for record in self._manifest.shards]
        stored = [shard.examples() for shard in shards]
        examples = np.concatenate([np.zeros(0, np.int64), *stored])
        row_of = np.full(examples.max(initial=-1) + 1, -1)
        row_of[examples] = np.arange(len(examples))
        return shards, offsets([*map(len, stored)])[:-1].tolist(), row_of

    def _shard(self, number: int) -> tuple[ShardRecord, Shard]:
        if self._open is None or not self._open[0].first <= number < self._open[0].end:
            record = self._manifest.holding(number)
            self._open = record, self._checked(record)
        return self._open

    def _checked(self, record: ShardRecord) -> Shard:
        path = self._folder / record.file
        with contextlib.suppress(OSError, SafetensorError):
            if sha256(path) == record.sha256:
                return Shard(path)
        raise TrainingError(
            f"{KEY}: {path}: is missing or damaged; remove it and run `tandem store` again, which "
            "writes it anew"
        )

    def _place(self, number: int) -> str:
        return f"{KEY}: {self._folder}: batch {number:,}"


def _labelled(batch: Batch) -> NDArray[np.bool_]:
    """Which slots [R, M] of the batch have a label, also where masks are yet to be chosen."""
    target = batch.targets[MASKED]
    if batch.to_mask is None:
        return target.is_labelled
    return np.arange(target.labels.shape[1]) < batch.to_mask[:, None]


def _in_slots(
    stored: StepLogits, labelled: NDArray[np.bool_], readable: NDArray[np.bool_] | None, place: str
) -> StoredLogits:
    """The stored logits in the slots of their positions; rows that cannot be read have none."""
    counts = stored.counts.numpy()
    is_read = np.ones(len(labelled), np.bool_) if readable is None else readable
    if len(counts) != len(labelled) or (counts != labelled.sum(axis=1))[is_read].any():
        raise TrainingError(f"{place}: has other masked positions than the job; store it again")
    kept = torch.from_numpy(np.repeat(is_read, counts))
    slots = labelled & is_read[:, None]

    def placed(values: torch.Tensor) -> NDArray[Any]:
        dense = torch.zeros((*labelled.shape, values.shape[1]), dtype=values.dtype)
        dense[torch.from_numpy(slots)] = values[kept]
        return dense.numpy()

    ids = None if stored.ids is None else placed(stored.ids.to(torch.int64))
    assert stored.values is not None
    return StoredLogits(placed(stored.values.float()), ids)
