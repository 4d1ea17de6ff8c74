"""Out-of-memory errors in one line: which learner ran out, where, and what to change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from trainer.errors import TrainingError
from trainer.learner_config import LearnerConfig
from trainer.measure.timing import BACKWARD, FORWARD, STEP

BEGINNING, EVALUATION = "beginning", "evaluation"  # building weights and engine; scoring
IN_MICRO_BATCHES = (FORWARD, BACKWARD, STEP, EVALUATION)

# Torch's CPU allocator raises a plain RuntimeError with one of these in its message.
CPU_WORDS = ("DefaultCPUAllocator", "not enough memory")


@contextlib.contextmanager
def named_for(section: str, config: LearnerConfig, part: str, micro_batch: int) -> Iterator[None]:
    """Turn an out-of-memory error in the block into a TrainingError that says where it happened.

    `section` is the learner's section of the job's config, `part` the part of its work.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _explained(section, config, part, micro_batch) from error
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in CPU_WORDS):
            raise
        raise _explained(section, config, part, micro_batch) from error


def _explained(section: str, config: LearnerConfig, part: str, micro_batch: int) -> TrainingError:
    remedies = []
    if micro_batch > 1 and part in IN_MICRO_BATCHES:
        remedies.append(f"batch.micro_batch={micro_batch // 2} (it is {micro_batch})")
    if not (config.frozen or config.checkpoint_activations) and part in (FORWARD, BACKWARD):
        remedies.append(f"{section}.checkpoint_activations=true")
    if config.zero_stage < (3 if config.frozen else 2):
        remedies.append(f"{section}.zero_stage={3 if config.frozen else config.zero_stage + 1}")
    remedies.append("more GPUs")
    return TrainingError(
        f"{section}: out of memory in its {part}; try {', or '.join(remedies)} "
        "(`tandem plan` says what fits)"
    )
