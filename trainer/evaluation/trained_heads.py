"""The heads of a learner that are trained; scores of other heads are meaningless."""

from __future__ import annotations

from trainer.learner_config import LearnerConfig
from trainer.learners.state import LearnerState
from trainer.objectives.step_schedule import StepSchedule


def trained_heads(config: LearnerConfig, counters: LearnerState, step: int) -> frozenset[str]:
    """The heads that are trained at the job's `step`.

    Either a term of the objective has trained the head, or it came with the initial weights. During
    a transfer, terms that train heads are off.
    """
    begin = config.transfer.steps if config.transfer else 0
    own_steps = counters.steps_made(step)
    return frozenset(counters.given_heads).union(
        term.head
        for term in config.objective.terms().values()
        if term.head is not None and StepSchedule.read(term.weight).weighs_between(begin, own_steps)
    )
