"""Running out of memory, said in one line: whose work it was and what to change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from trainer.errors import TrainingError

# How torch's CPU allocator says it, in a plain RuntimeError.
CPU_WORDS = ("DefaultCPUAllocator", "not enough memory")


@contextlib.contextmanager
def named_for(section: str, part: str, micro_batch: int, zero_stage: int) -> Iterator[None]:
    """Turn running out of memory in a learner's `part` into a TrainingError that names it.

    `section` is the learner's in the config; `micro_batch` and `zero_stage` are its own.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _explained(section, part, micro_batch, zero_stage) from error
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in CPU_WORDS):
            raise
        raise _explained(section, part, micro_batch, zero_stage) from error


def _explained(section: str, part: str, micro_batch: int, zero_stage: int) -> TrainingError:
    remedies = []
    if micro_batch > 1:
        remedies.append(f"batch.micro_batch={micro_batch // 2} (it is {micro_batch})")
    if zero_stage < 2:
        remedies.append(f"{section}.zero_stage={zero_stage + 1}")
    remedies.append("more GPUs, or a smaller model")
    return TrainingError(
        f"{section}: out of memory in its {part}; try {', or '.join(remedies)}. "
        "`tandem plan` says what fits"
    )
