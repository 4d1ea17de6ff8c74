"""The `batch` section of a job, and the shape of steps that follows from it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from configs.rules import COUNT, ROWS, Ascending, Range, Unit
from configs.section import Refusal, Section

DEFAULT_SIZE = 64
TOKENS = Range(1, 2**40)


@dataclass(frozen=True)
class BatchSize:
    """A global batch: this many sequences, or about this many tokens; the other one is None."""

    sequences: int | None
    tokens: int | None


class MicroBatchLimits:
    """The most sequences, and the most tokens, on one rank at a time."""

    micro_batch: int
    micro_tokens: int | None

    def micro_rows(self, length: int) -> int:
        """The most sequences of this length in a micro-batch."""
        if self.micro_tokens is None:
            return self.micro_batch
        return max(1, min(self.micro_batch, self.micro_tokens // length))


@dataclass
class GrowthConfig(Section):
    """A new global batch size from a given step on, in sequences or in tokens."""

    step: Annotated[int, COUNT, Unit("steps"), "The first step with this size."]
    size: Annotated[int | None, ROWS, Unit("sequences"), "The size in sequences."] = None
    tokens: Annotated[int | None, TOKENS, Unit("tokens"), "Or the size in tokens."] = None

    def conflicts(self) -> Iterator[Refusal]:
        if (self.size is None) == (self.tokens is None):
            yield "tokens", "set either size or tokens, and the other one to null"


@dataclass
class BatchConfig(MicroBatchLimits, Section):
    """The global batch of an optimizer step, and what fits on one rank at a time."""

    size: Annotated[
        int | None,
        ROWS,
        Unit("sequences"),
        f"The global batch in sequences; {DEFAULT_SIZE} if `tokens` is not set either.",
    ] = None
    tokens: Annotated[
        int | None,
        TOKENS,
        Unit("tokens"),
        "About this many tokens without padding, instead of `size`, whatever the sequence "
        "length and packing. The size in sequences is then a multiple of `multiple`.",
    ] = None
    multiple: Annotated[
        int,
        ROWS,
        Unit("sequences"),
        "Sizes that follow from `tokens` are multiples of this. It must be a multiple of the "
        "number of ranks.",
    ] = 8
    micro_batch: Annotated[
        int,
        ROWS,
        Unit("sequences"),
        "The largest micro-batch on one rank. It determines the gradient accumulation of each "
        "step, together with the number of ranks.",
    ] = 64
    micro_tokens: Annotated[
        int | None,
        TOKENS,
        Unit("tokens"),
        "A micro-batch also has at most this many tokens, so that a phase of longer "
        "sequences fits into memory; null: only `micro_batch` limits it.",
    ] = None
    growth: Annotated[
        list[GrowthConfig],
        Ascending(by="step"),
        "Other sizes from later steps on. Each epoch is still read completely.",
    ] = field(default_factory=list)

    def conflicts(self) -> Iterator[Refusal]:
        if self.size is not None and self.tokens is not None:
            yield "tokens", "set either size or tokens, and the other one to null"
        if not self.in_tokens:
            for key in self.changed("multiple"):
                yield key, "is for sizes in tokens; remove it"

    @property
    def in_tokens(self) -> bool:
        """Whether the batch is stated in tokens at some steps."""
        return bool(self.tokens or any(growth.tokens for growth in self.growth))

    def at(self, step: int) -> BatchSize:
        """The size at a step."""
        for growth in reversed(self.growth):
            if growth.step <= step:
                return BatchSize(growth.size, growth.tokens)
        return BatchSize(self.size if self.size or self.tokens else DEFAULT_SIZE, self.tokens)


# DeepSpeed keeps reduction buckets per engine, 5e8 elements by default, so ten small students would
# cost tens of gigabytes. A bucket never needs to be larger than the model, and at stage 3 a large
# model's gradients are reduced during its backward pass only if they fill several: BERT-large's 7.
LARGEST_BUCKET = 50_000_000


@dataclass(frozen=True)
class StepShape(MicroBatchLimits):
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
