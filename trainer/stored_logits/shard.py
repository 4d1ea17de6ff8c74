"""A shard: the stored logits of consecutive batches, in one safetensors file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

ROWS, COUNTS, VALUES, IDS, EXAMPLES = "rows", "counts", "values", "ids", "examples"
VALUE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ID_DTYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}  # by their bytes


@dataclass(frozen=True)
class StepLogits:
    """Stored logits of R consecutive rows of one batch, with N masked positions in all.

    counts: int32 [R], the positions of each row; values: [N, k]; ids: [N, k] the tokens, largest
    logit first; None where values has the whole vocabulary, in its order. examples: int64 [R], the
    numbers of the rows' examples; None where rows are found by their batch.
    """

    counts: Tensor
    values: Tensor
    ids: Tensor | None
    examples: Tensor | None = None

    @classmethod
    def joined(cls, parts: Sequence[StepLogits]) -> StepLogits:
        """The rows of all parts, in this order."""
        ids = [part.ids for part in parts if part.ids is not None]
        examples = [part.examples for part in parts if part.examples is not None]
        return cls(
            torch.cat([part.counts for part in parts]),
            torch.cat([part.values for part in parts]),
            torch.cat(ids) if ids else None,
            torch.cat(examples) if examples else None,
        )

    def of_examples(self, numbers: Tensor, kept: Tensor) -> StepLogits:
        """The rows where `kept` [R] is true, of the examples with these numbers [R]."""
        positions = kept.repeat_interleave(self.counts)
        ids = None if self.ids is None else self.ids[positions]
        return StepLogits(self.counts[kept], self.values[positions], ids, numbers[kept])

    @property
    def size(self) -> int:
        """Bytes of the tensors."""
        there = (self.counts, self.values, self.ids, self.examples)
        return sum(one.numel() * one.element_size() for one in there if one is not None)


def encode(steps: Sequence[StepLogits]) -> bytes:
    """The content of a shard of these batches."""
    rows = torch.tensor([len(step.counts) for step in steps], dtype=torch.int32)
    everything = StepLogits.joined(steps)
    tensors = {ROWS: rows, COUNTS: everything.counts, VALUES: everything.values}
    if everything.ids is not None:
        tensors[IDS] = everything.ids
    if everything.examples is not None:
        tensors[EXAMPLES] = everything.examples
    return safetensors.torch.save(tensors)


def decode(content: bytes) -> StepLogits:
    """All rows of a shard's content, as if of one batch."""
    tensors = safetensors.torch.load(content)
    ids, examples = tensors.get(IDS), tensors.get(EXAMPLES)
    return StepLogits(tensors[COUNTS], tensors[VALUES], ids, examples)


class Shard:
    """Reads parts of a shard's batches; the file is mapped, not loaded."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, "pt")
        self._names = list(self._file.keys())
        self._ends = self._file.get_tensor(ROWS).cumsum(0).tolist()
        self._counts = self._file.get_tensor(COUNTS)
        self._positions = [0, *self._counts.cumsum(0).tolist()]  # before each row

    def step(self, number: int, rank: int, world_size: int) -> StepLogits:
        """A rank's rows of the shard's batch of this number, from 0."""
        begin, end = (0, *self._ends)[number], self._ends[number]
        share = (end - begin) // world_size
        return self._rows_in(slice(begin + rank * share, begin + (rank + 1) * share))

    def examples(self) -> list[int]:
        """The number of each row's example; none where rows are found by their batch."""
        return self._file.get_tensor(EXAMPLES).tolist() if EXAMPLES in self._names else []

    def row(self, row: int) -> StepLogits:
        """The row of this number, from 0, whichever its batch."""
        return self._rows_in(slice(row, row + 1))

    def _rows_in(self, rows: slice) -> StepLogits:
        at = slice(self._positions[rows.start], self._positions[rows.stop])
        return StepLogits(
            self._counts[rows],
            self._file.get_slice(VALUES)[at],
            self._file.get_slice(IDS)[at] if IDS in self._names else None,
        )
