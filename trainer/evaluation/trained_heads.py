"""The heads of a learner that are trained; scores of other heads are meaningless."""

from __future__ import annotations

from trainer.learner_config import LearnerConfig
from trainer.learners.state import LearnerState
from trainer.objectives.term import StepSchedule


def trained_heads(config: LearnerConfig, counters: LearnerState, step: int) -> frozenset[str]:
    """The heads that are trained at the job's `step`.

    Either a term of the objective has trained the head, in a stage in which the term is on, or it
    came with the initial weights.
    """
    stages, made = config.stages, counters.steps_made(step)
    trained = set(counters.given_heads)
    for term in config.objective.terms().values():
        weight = StepSchedule.read(term.weight)
        spans = stages.spans(term.compares, made)
        if term.head is not None and any(weight.weighs_between(*span) for span in spans):
            trained.add(term.head)
    return frozenset(trained)
