"""What the pipeline hands to the trainer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.masking.masker import NO_LABEL


@dataclass(frozen=True)
class Batch:
    """R packed and masked sequences of length L with M slots for masked positions each."""

    input_ids: NDArray[np.int64]  # [R, L]
    segment_ids: NDArray[np.int64]  # [R, L] 0 or 1
    attention_mask: NDArray[np.int64]  # [R, L] 1 where there is a token, 0 at padding
    masked_positions: NDArray[np.int64]  # [R, M] column index, spare slots 0
    masked_labels: NDArray[np.int64]  # [R, M] the id that was there, -100 in spare slots
    pair_labels: NDArray[np.int64] | None  # [R]
    sample_ids: NDArray[np.int64]  # [R] unique within an epoch
    epochs: NDArray[np.int64]  # [R]
    to_mask: NDArray[np.int64] | None = None  # [R] positions still to be chosen; None: done
    readable: NDArray[np.bool_] | None = None  # [R] None: all

    def rows(self, first: int, last: int) -> Batch:
        """The rows from `first` up to `last`, as views."""
        return self.take(slice(first, last))

    def take(self, rows: slice | NDArray[np.int64]) -> Batch:
        """The rows that an index selects: views of a slice, copies of an array."""
        taken: dict[str, Any] = {
            one.name: None if (array := getattr(self, one.name)) is None else array[rows]
            for one in fields(self)
        }
        return Batch(**taken)

    def labels(self) -> NDArray[np.int64]:
        """Dense labels [R, L]: the original id at masked positions, -100 elsewhere."""
        dense = np.full(self.input_ids.shape, NO_LABEL, np.int64)
        row, slot = np.nonzero(self.masked_labels != NO_LABEL)
        dense[row, self.masked_positions[row, slot]] = self.masked_labels[row, slot]
        return dense
