"""The batch that the pipeline hands to the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.masking.masker import NO_LABEL

# The names of the targets of a text corpus. A task with data of its own may add others.
MASKED, PAIRS = "masked", "pairs"
DEFAULT_VIEW = "default"


@dataclass(frozen=True)
class Target:
    """The labels of R sequences; -100 where there is none.

    Token labels are [R, M]; `positions` [R, M] holds their columns, 0 in unused slots. Labels of
    whole sequences are [R], and `positions` is None.
    """

    labels: NDArray[np.int64]
    positions: NDArray[np.int64] | None = None

    def take(self, rows: slice | NDArray[np.int64]) -> Target:
        """The labels of the given rows."""
        return Target(self.labels[rows], None if self.positions is None else self.positions[rows])


@dataclass(frozen=True)
class Batch:
    """R sequences of length L, with their targets by name.

    A batch of text has the target `MASKED`, with M slots for masked positions in each sequence. If
    its sequences are pairs, it also has the target `PAIRS`, with one label for each sequence.

    views: the same examples in other forms, by name, such as [X; Y] beside X. Rows and labels are
    in the same order in every view; positions are specific to a view.
    """

    input_ids: NDArray[np.int64]  # [R, L]
    segment_ids: NDArray[np.int64]  # [R, L] 0 or 1
    attention_mask: NDArray[np.int64]  # [R, L] 1 where there is a token, 0 at padding
    targets: Mapping[str, Target]
    sample_ids: NDArray[np.int64]  # [R] unique within an epoch
    epochs: NDArray[np.int64]  # [R]
    to_mask: NDArray[np.int64] | None = None  # [R] positions still to be chosen; None: masked
    readable: NDArray[np.bool_] | None = None  # [R] False for unreadable sequences; None: all True
    views: Mapping[str, Batch] = field(default_factory=dict)

    def rows(self, first: int, last: int) -> Batch:
        """The rows from `first` up to `last`, as views."""
        return self.take(slice(first, last))

    def take(self, rows: slice | NDArray[np.int64]) -> Batch:
        """The rows that an index selects: views for a slice, copies for an array."""
        taken: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        for name, value in taken.items():
            if isinstance(value, Mapping):
                taken[name] = {key: part.take(rows) for key, part in value.items()}
            elif value is not None:
                taken[name] = value[rows]
        return Batch(**taken)

    def view(self, name: str) -> Batch:
        """The examples in the form that learners of this view read."""
        return self if name == DEFAULT_VIEW else self.views[name]

    def labels(self) -> NDArray[np.int64]:
        """Dense labels [R, L]: the original id at masked positions, -100 elsewhere."""
        dense, masked = np.full(self.input_ids.shape, NO_LABEL, np.int64), self.targets[MASKED]
        assert masked.positions is not None
        row, slot = np.nonzero(masked.labels != NO_LABEL)
        dense[row, masked.positions[row, slot]] = masked.labels[row, slot]
        return dense
