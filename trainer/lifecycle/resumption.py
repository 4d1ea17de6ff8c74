"""What a person is told when a run starts or resumes."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.checkpoint import Checkpoint
from trainer.config import JobConfig
from trainer.learner_names import TEACHER, student_key
from trainer.lifecycle import unreached


def what_is_resumed(
    config: JobConfig, checkpoint: Checkpoint | None, newest: Checkpoint | None
) -> Iterator[str]:
    """One line each: where the run resumes, who is dropped, what its steps never reach.

    `checkpoint` is the one that it resumes from, `newest` the newest there is.
    """
    if checkpoint is not None:
        yield f"resuming from step {checkpoint.step:,}"
    if checkpoint is not newest:
        yield f"the checkpoints after it no longer count: {config.rollback[-1]}"
    there = set(checkpoint.learners) if checkpoint else set()
    for name in sorted(there - {TEACHER, *map(student_key, config.students)}):
        yield f"{name} is dropped: it is not in the config"
    if late := unreached.warning(config):
        yield late
    if not config.students:
        yield "no students: plain pre-training of the teacher"
