"""The heads of a learner that are trained; scores of other heads are meaningless."""

from __future__ import annotations

from trainer.learner_config import LearnerConfig
from trainer.learners.state import LearnerState
from trainer.objectives.term import StepSchedule


def trained_heads(config: LearnerConfig, counters: LearnerState, step: int) -> frozenset[str]:
    """The heads that are trained at the job's `step`.

    Either a term of the objective has trained the head, or it came with the initial weights. During
    a transfer, only its own terms are on.
    """
    transfer, made = config.transfer, counters.steps_made(step)
    found = set(counters.given_heads)
    for term in config.objective.terms().values():
        begin, end = 0, made
        if transfer is not None and term.compares in transfer.first:
            end = min(made, transfer.steps)
        elif transfer is not None:
            begin = transfer.steps
        if term.head is not None and StepSchedule.read(term.weight).weighs_between(begin, end):
            found.add(term.head)
    return frozenset(found)
