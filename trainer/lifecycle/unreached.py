"""Events in a job's config that its steps never reach, which is normal for a short trial run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainer.learner_names import section_of

if TYPE_CHECKING:
    from trainer.config import JobConfig
    from trainer.learner_config import LearnerConfig


def warning(config: JobConfig) -> str:
    """One line that names everything scheduled after the last step; empty if there is nothing."""
    found = list(_unreached(config)) if config.steps else []  # not known before it is prepared
    if not found:
        return ""
    return f"steps: {config.steps} end before {', '.join(found)}; fine for a trial run"


def _unreached(config: JobConfig) -> Iterator[str]:
    steps = config.steps
    for name, learner in config.in_steps().learners.items():
        section = section_of(name)
        if learner.schedule.warmup_steps >= _steps_of(learner, steps):
            yield f"{section}.schedule.warmup_steps ({learner.schedule.warmup_steps})"
        for key, section_of_stages in learner.transfers.items():
            first = section_of_stages.build(learner.model.layers).last_begins
            if first >= _steps_of(learner, steps):
                yield f"the end of {section}.{key} ({first})"
        if learner.start.step >= steps:
            yield f"{section}.start.step ({learner.start.step})"
    for key, starts in {
        "batch.growth": [one.step for one in config.batch.growth],
        "data.phases": [one.from_step for one in config.data.phases],
        "teacher.stacking.steps": config.teacher.stacking.steps,
        "profile.steps": list(config.profile.span or ())[:1],
    }.items():
        late = [step for step in starts if step >= steps]
        if late:
            yield f"{key} ({late[0]})"


def _steps_of(learner: LearnerConfig, steps: int) -> int:
    return min(learner.budget.steps or steps, steps)
