"""Out-of-memory errors in one line: whose work it was and what to change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from trainer.errors import TrainingError
from trainer.learner_config import LearnerConfig
from trainer.measure.parts import BACKWARD, FORWARD, STEP

BEGINNING, EVALUATION = "beginning", "evaluation"  # when weights and engine are made, or scored
IN_MICRO_BATCHES = (FORWARD, BACKWARD, STEP, EVALUATION)

# How torch's CPU allocator says it, in a plain RuntimeError.
CPU_WORDS = ("DefaultCPUAllocator", "not enough memory")


@contextlib.contextmanager
def named_for(section: str, config: LearnerConfig, part: str, micro_batch: int) -> Iterator[None]:
    """Turn running out of memory in a `part` of a learner's work into one line that names it.

    `section` is the learner's in the job's config. Raises TrainingError.
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
    if not config.checkpoint_activations and part in (FORWARD, BACKWARD):
        remedies.append(f"{section}.checkpoint_activations=true")
    if config.zero_stage < 2:
        remedies.append(f"{section}.zero_stage={config.zero_stage + 1}")
    remedies.append("more GPUs")
    return TrainingError(
        f"{section}: out of memory in its {part}; try {', or '.join(remedies)} "
        "(`tandem plan` says what fits)"
    )
