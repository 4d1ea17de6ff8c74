"""Setbacks: students that learn worse than the run's own measurements lead one to expect.

Everything is measured on the same held-out tokens. A learner's lead is how much lower its loss is
than that of the unigram baseline, which guesses by frequency. A student has a setback when, at two
evaluations in a row after its warm-up,

- its lead is negative (`WORSE`),
- its lead is less than the fraction `EXPECTED` of its teacher's lead after the same number of the
  teacher's own steps (`BEHIND`): the terms that read the teacher harm it more than they help, or
- it has lost more than the fraction `LOSS_OF_LEAD` of its own best lead, while its teacher's lead
  is at its best (`FALLING_BACK`).

The teacher's curve is the only measure of how fast a model learns on this data. So `WORSE` waits
until the teacher had a lead of `KNOWN` after that number of steps (a teacher that predicts no
masked tokens, as ELECTRA's, has none), and `BEHIND` applies only if the teacher began with random
weights in this job.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.config import JobConfig
from trainer.learner_config import LearnerConfig
from trainer.learner_life import StartConfig
from trainer.learner_names import TEACHER, student_key

EXPECTED = 0.5
LOSS_OF_LEAD = 0.1
KNOWN = 0.1  # nats; a smaller lead may be due to chance
WORSE, BEHIND, FALLING_BACK = "worse than the unigram", "behind its teacher", "falling back"

Curve = Sequence[tuple[int, float]]  # a learner's own steps and its lead, one entry per evaluation


@dataclass(frozen=True)
class Setback:
    """A student that learns badly; `says` is a line for the user that says what to do."""

    learner: str
    kind: str
    step: int
    says: str


def setbacks(
    config: JobConfig,
    step: int,
    losses: Mapping[str, Sequence[Sequence[float]]],
    warm_ups: Mapping[str, float],
    unigram: float | None,
) -> list[Setback]:
    """The setbacks at the evaluation of `step`.

    losses: each learner's own steps and held-out loss, in nats, at every evaluation so far.
    warm_ups: each student's own step at which its learning rate stops rising.
    unigram: the baseline's loss; without one (None) there are no setbacks.
    """
    if unigram is None:
        return []
    leads = {
        name: [(int(steps), unigram - loss) for steps, loss in curve]
        for name, curve in losses.items()
    }
    diagnosed = []
    for name, student in config.students.items():
        key = student_key(name)
        curves = leads.get(TEACHER, []), leads.get(key, [])
        diagnosis = _diagnose(config.teacher, student, *curves, warm_ups.get(key, 0.0))
        if diagnosis is not None:
            kind, measured = diagnosis
            advice = _advice(config, name)
            diagnosed.append(Setback(key, kind, step, f"{key} is {kind}: {measured}; {advice}"))
    return diagnosed


def _diagnose(
    teacher: LearnerConfig, student: LearnerConfig, taught: Curve, curve: Curve, warm_up: float
) -> tuple[str, str] | None:
    """The kind of a student's setback and its evidence; None if it has none.

    warm_up: the student's own step at which its learning rate stops rising.
    """
    newest = curve[-2:]
    if len(newest) < 2 or newest[0][0] <= warm_up:
        return None
    steps, lead = newest[-1]
    grew_up_here = not teacher.frozen and teacher.init.weights is None
    expected = [_at_age(taught if grew_up_here else [], age) for age, _ in newest]
    known = all(value >= KNOWN for value in expected)
    if (known or not grew_up_here) and all(value < 0 for _, value in newest):
        return WORSE, f"its loss is {-lead:.3f} above guessing by frequency after {steps:,} steps"
    reads_teacher = student.objective.reads_main_teacher()
    pairs = zip(expected, newest, strict=True)
    if known and reads_teacher and all(lead < EXPECTED * value for value, (_, lead) in pairs):
        return BEHIND, (
            f"after {steps:,} steps its loss is {lead:.3f} below guessing by frequency, and its "
            f"teacher's was {expected[-1]:.3f} below"
        )
    best = max(lead for _, lead in curve)
    has_fallen = best >= KNOWN and all(value < (1 - LOSS_OF_LEAD) * best for _, value in newest)
    if has_fallen and taught and taught[-1][1] == max(value for _, value in taught):
        return FALLING_BACK, (
            f"its loss has risen by {best - lead:.3f} since its best evaluation, and its teacher's "
            "is at its lowest"
        )
    return None


def _at_age(taught: Curve, steps: int) -> float:
    """The teacher's lead at the last evaluation within its first `steps` steps; NaN without one."""
    return next((lead for age, lead in reversed(taught) if age <= steps), math.nan)


def _advice(config: JobConfig, name: str) -> str:
    if not config.students[name].objective.reads_main_teacher():
        return "lower its learning rate"
    if config.teacher.frozen or config.students[name].start != StartConfig():
        return "weigh its terms about the teacher less, or lower its learning rate"
    half = config.steps // 2
    return (
        f"start it when its teacher has learned something: students.{name}.start: {{step: {half}}}"
    )
