"""When a student joins a job: a pure function of the step and the teacher's last evaluation."""

from __future__ import annotations

from trainer.config import StartConfig
from trainer.state import HeldOut, JobState


def is_due(start: StartConfig, state: JobState, unigram: HeldOut) -> bool:
    """Whether a student with this `start` joins before step `state.step`."""
    if state.step < start.step:
        return False
    teacher = state.teacher_held_out
    reached = []
    if start.teacher_loss is not None:
        reached.append(teacher is not None and teacher.loss <= start.teacher_loss)
    if start.teacher_accuracy_over_unigram is not None:
        lead = teacher.accuracy - unigram.accuracy if teacher else float("-inf")
        reached.append(lead >= start.teacher_accuracy_over_unigram)
    return all(reached)
