"""When a student joins a job and when it is done: pure functions of the checkpointed state."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trainer.admission_config import BudgetConfig, StartConfig
from trainer.learners.state import JobState, LearnerState
from trainer.scoring.scores import with_leads

HOUR = 3600.0


def is_due(start: StartConfig, state: JobState, unigram: Mapping[str, float], primary: str) -> bool:
    """Whether a student with this `start` joins before step `state.step`.

    `primary` is the metric of a threshold that names none; `unigram` holds the baseline's scores.
    """
    threshold = start.teacher
    if state.step < start.step or threshold is None:
        return state.step >= start.step
    score = with_leads(state.teacher_held_out or {}, unigram).get(threshold.metric or primary)
    if score is None:  # no evaluation yet, or of a head that nothing has trained
        return False
    too_low = threshold.at_least is not None and not score >= threshold.at_least
    too_high = threshold.at_most is not None and not score <= threshold.at_most
    return not (too_low or too_high)


def is_over(budget: BudgetConfig, counters: LearnerState, step: int, seconds: float) -> bool:
    """Whether a learner has used up its budget once the job has done `step` steps in `seconds`.

    For a learner that is done, the answer is about the step and time at which it was done, since
    the budget may have been edited.
    """
    if counters.finished_at is not None:
        step, seconds = counters.finished_at, counters.finished_after or seconds
    steps = step - counters.started_at
    return (
        (budget.steps is not None and steps >= budget.steps)
        or (budget.tokens is not None and counters.tokens >= budget.tokens)
        or time_used(budget, counters, seconds, last=math.inf) >= 1
        or has_no_patience_left(budget, counters)
    )


def has_no_patience_left(budget: BudgetConfig, counters: LearnerState) -> bool:
    """Whether a learner's last ``patience`` evaluations were not better than its best."""
    best = counters.best
    return budget.patience is not None and best is not None and best.evaluations >= budget.patience


def schedule_steps(budget: BudgetConfig, counters: LearnerState, step: int, last: int) -> float:
    """The length of a schedule in steps, from the learner's start to its end or the job's `last`.

    A budget in tokens is converted at the learner's average tokens per step up to `step`.
    """
    steps: list[float] = [last - counters.started_at]
    if budget.steps is not None:
        steps.append(budget.steps)
    if budget.tokens is not None and counters.tokens:
        steps.append((step - counters.started_at) * budget.tokens / counters.tokens)
    return min(steps)


def time_used(budget: BudgetConfig, counters: LearnerState, seconds: float, last: float) -> float:
    """The fraction of its time that a learner has used after `seconds` of the job.

    `last` is the job's own limit in seconds. Returns 0 if neither the budget nor the job has a
    limit.
    """
    if counters.clocked_from is None:
        return 0.0
    limit = last - counters.clocked_from
    if budget.hours is not None:
        limit = min(limit, budget.hours * HOUR)
    return (seconds - counters.clocked_from) / max(limit, 1.0)
