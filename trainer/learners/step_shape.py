"""The shape of a job's steps, as its learners know it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.batch_config import micro_rows

# DeepSpeed keeps reduction buckets per engine, 5e8 elements by default, so ten small students would
# cost tens of gigabytes. A bucket never needs to be larger than the model, and at stage 3 a large
# model's gradients are reduced during its backward pass only if they fill several: BERT-large's 7.
LARGEST_BUCKET = 50_000_000


@dataclass(frozen=True)
class StepShape:
    """The facts of a job that a learner needs: length, seed and the shape of a step."""

    steps: int
    seed: int
    micro_batch: int  # sequences per rank and forward pass, at most
    accumulation: int  # micro-batches per rank, in the step that has the most
    micro_tokens: int | None = None  # tokens per rank and forward pass, at most
    seconds: float = math.inf  # training time after which the job ends
    # The first step of each phase of the data, with a new base of rotary positions or None.
    phases: Sequence[tuple[int, float | None]] = ()
    is_ragged: bool = False  # whether every batch has a length of its own

    def micro_rows(self, length: int) -> int:
        """The most sequences of this length in a micro-batch."""
        return micro_rows(self.micro_batch, self.micro_tokens, length)

    def rope_theta(self, step: int) -> float | None:
        """The base of rotary positions at a step; None: each model's own."""
        bases = [base for start, base in self.phases if start <= step and base]
        return bases[-1] if bases else None

    def phase(self, step: int) -> tuple[int, ...]:
        """The number of the phase of a step; nothing in a job without phases."""
        return (sum(start <= step for start, _ in self.phases),) if self.phases else ()


@dataclass(frozen=True)
class MicroStep:
    """Which micro-batch of which step, both from 0, and whether it is the step's last."""

    step: int
    micro_batch: int
    is_last: bool


def bucket_size(parameters: int) -> int:
    """Elements of the reduction bucket of a learner with this many parameters."""
    return min(LARGEST_BUCKET, parameters + parameters % 2)  # DeepSpeed wants an even number
