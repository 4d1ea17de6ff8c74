"""Micro-batches on the device, and the counts every loss is divided by.

Shapes: B rows, L positions, P masked-position slots (B times the per-row capacity).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline import NO_LABEL, Batch
from data_pipeline.masking.torch_masker import TorchMasker


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass reads."""

    input_ids: Tensor  # [B, L] int64
    segment_ids: Tensor  # [B, L] int64
    attention_mask: Tensor  # [B, L] bool, True where there is a token
    is_padded: bool  # whether any position is padding; known on the host
    masked_positions: Tensor  # [P] int64, flat indices into B * L
    masked_labels: Tensor  # [P] int64, -100 in spare slots
    pair_labels: Tensor  # [B] int64, 0 or 1; -100 where a row has none

    @property
    def lengths(self) -> Tensor | None:
        """Tokens of each row, int64 [B], where anything is padded: kernels without are faster.

        Padding follows the tokens, so that this says as much as the attention mask does.
        """
        return self.attention_mask.sum(dim=1) if self.is_padded else None


# Sets of positions, named by the field of `Counts` that says how many there are.
MASKED, ATTENDED = "masked", "attended"


@dataclass(frozen=True)
class Counts:
    """How many of each unit there are: the denominators of the losses, known from the masks.

    Each field is a scalar float32 tensor once summed over the ranks.
    """

    masked: Tensor  # positions with a masked-LM label
    attended: Tensor  # positions that are not padding
    attended_pairs: Tensor  # pairs of such positions in one row
    rows: Tensor  # rows with any token
    pairs: Tensor  # rows with a pair label


def to_micro_batches(
    batch: Batch, size: int, device: torch.device, masker: TorchMasker | None = None
) -> Iterator[MicroBatch]:
    """Cut a rank's rows into micro-batches of at most `size`, and move each when it is needed.

    `masker` masks them on the device where the batch came without masks.
    """
    for begin in range(0, len(batch.input_ids), size):
        yield to_device(batch.rows(begin, begin + size), device, masker)


def to_device(batch: Batch, device: torch.device, masker: TorchMasker | None = None) -> MicroBatch:
    """All rows of `batch` as one micro-batch."""
    rows, length = batch.input_ids.shape
    pair_labels = np.full(rows, NO_LABEL) if batch.pair_labels is None else batch.pair_labels

    def move(array: np.ndarray, dtype: torch.dtype = torch.int64) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
        if device.type == "cuda":
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor

    input_ids = move(batch.input_ids)
    if batch.to_mask is None:
        positions, labels = move(batch.masked_positions), move(batch.masked_labels)
    else:
        assert masker is not None, "a batch without masks"
        masked = masker(
            input_ids,
            move(batch.epochs),
            move(batch.sample_ids),
            move(batch.to_mask),
            slots=batch.masked_positions.shape[1],
        )
        input_ids, positions, labels = masked.input_ids, masked.positions, masked.labels
    first_of_row = torch.arange(0, rows * length, length, device=device)[:, None]  # [B, 1]
    return MicroBatch(
        input_ids=input_ids,
        segment_ids=move(batch.segment_ids),
        attention_mask=move(batch.attention_mask, torch.bool),
        is_padded=not batch.attention_mask.all(),
        masked_positions=(positions + first_of_row).view(-1),
        masked_labels=labels.view(-1),
        pair_labels=move(pair_labels),
    )


def count(batch: Batch) -> list[int]:
    """This rank's counts, in the order of the fields of `Counts`."""
    lengths = batch.attention_mask.astype(np.int64).sum(axis=1)  # [B]
    pairs = 0 if batch.pair_labels is None else int((batch.pair_labels != NO_LABEL).sum())
    if batch.to_mask is None:
        masked = int((batch.masked_labels != NO_LABEL).sum())
    else:
        masked = int(batch.to_mask.sum())
    rows = int((lengths > 0).sum())
    return [masked, int(lengths.sum()), int((lengths**2).sum()), rows, pairs]


def unreadable(batch: Batch) -> int:
    """This rank's rows that could not be read."""
    return 0 if batch.readable is None else int((~batch.readable).sum())


def sum_over_ranks(
    counts: list[int], others: list[float], device: torch.device
) -> tuple[Counts, Tensor]:
    """One all-reduce before the first forward: the global counts, and the sums of all `others`.

    float64 keeps the integers exact up to 2**53.
    """
    values = torch.tensor([*counts, *others], dtype=torch.float64)
    values = values.to(device, non_blocking=True)
    dist.all_reduce(values)
    totals = values[: len(counts)].clamp(min=1).float()
    return Counts(*totals.unbind()), values[len(counts) :]
