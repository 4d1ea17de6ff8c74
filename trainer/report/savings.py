"""The savings of a joint job: the cost of each learner here, and in separate jobs.

In the usual recipe the teacher is pre-trained alone. Each student then has a job of its own, which
also pays for the forward passes of the finished teacher. Nothing else that students share, such as
reading data, is counted.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from configs.progress import duration
from trainer.learner_names import BACKWARD, FORWARD, MEAN, STEP, TEACHER, is_teacher, plain_name
from trainer.report.elements import html_table, percent, short
from trainer.run_folder.run_files import RunFiles

TIMED = (
    "The time of a step is the median over this run's logged steps on rank 0, without evaluation, "
    "checkpoints and waiting for data. The forward pass of a teacher that trains has its losses in "
    "it; half of its backward pass, if shorter, stands for the forward pass of a finished one."
)
COUNTED = "No step of this run was timed: these are the FLOPs of the models' matrix products."


@dataclass(frozen=True)
class Cost:
    """The cost of a learner in this job and separately, in seconds or in FLOPs."""

    learner: str
    here: float
    separately: float


@dataclass(frozen=True)
class StepCosts:
    """The cost of one step in seconds, or in FLOPs where nothing was timed."""

    timed: bool
    trained: dict[str, float]  # by learner, while it is trained: forward, backward and update
    teaching: dict[str, float]  # by teacher: a forward pass of one that is not trained
    reading: dict[str, dict[str, float]]  # by student: the forward of each teacher that it reads


def savings_section(run: RunFiles) -> str:
    """The costs side by side; empty until there are results, and where nothing is saved."""
    step = step_costs(run)
    if step is None:
        return ""
    learners = costs(run, step)
    if all(cost.here >= cost.separately for cost in learners):
        return ""
    total = Cost("", sum(cost.here for cost in learners), sum(cost.separately for cost in learners))
    rows = [_row(plain_name(cost.learner), cost, step.timed) for cost in learners]
    rows.append(_row("together", total, step.timed))
    table = html_table(("learner", "in this job", "separately", "saved"), rows)
    note = f"<p>{_separately(run)} {TIMED if step.timed else COUNTED}</p>"
    return f'<section class="savings"><h2>Cost</h2>{table}{note}</section>'


def step_costs(run: RunFiles) -> StepCosts | None:
    """The cost of a step for each learner; None without results of a teacher and students.

    A teacher whose predictions are stored has none.
    """
    learners = run.evaluation["learners"] if run.evaluation else {}
    names = [name for name in run.learners if name in learners]
    students = [name for name in names if not is_teacher(name)]
    if TEACHER not in names or not students:
        return None
    if run.config["teacher"].get("stored"):  # its predictions are, so it does not run
        names.remove(TEACHER)
    teachers = [name for name in names if is_teacher(name)]
    beside = {student: _rows(run, student, FORWARD) for student in students}
    reading = {
        student: {name: _finished(beside[student], name) for name in read}
        for student, read in _read(learners, students, teachers).items()
    }
    if all(beside.values()):
        rows_of = {name: _rows(run, name, BACKWARD) for name in names}
        trained = {
            name: _median(rows, name, FORWARD, BACKWARD, STEP) for name, rows in rows_of.items()
        }
        teaching = {
            name: _median(_untrained(_rows(run, name, FORWARD), name), name, FORWARD)
            for name in teachers
        }
        return StepCosts(True, trained, teaching, reading)
    tokens = run.last["tokens"] / max(1, run.last["step"])
    flops = {name: tokens * learners[name].get("flops_per_token", 0.0) for name in names}
    if not all(flops.values()):
        return None
    forward = {name: flops[name] / 3 for name in teachers}
    read = {student: {name: forward[name] for name in names} for student, names in reading.items()}
    return StepCosts(False, flops, forward, read)


def _read(
    learners: Mapping[str, Any], students: Sequence[str], teachers: Sequence[str]
) -> dict[str, list[str]]:
    """The teachers whose outputs each student reads; a run of before says nothing: all."""
    reads = {name: learners[name].get("listens_to", [MEAN]) for name in students}
    return {
        name: [teacher for teacher in teachers if MEAN in sources or teacher in sources]
        for name, sources in reads.items()
    }


def costs(run: RunFiles, step: StepCosts) -> list[Cost]:
    """The cost of every trained learner.

    Here a teacher that is frozen, or has used up its budget, runs once for all students that train:
    those that read it share the cost of that pass equally.
    """
    assert run.evaluation is not None
    steps = {name: _steps(name, run.evaluation) for name in step.trained}
    shares = dict.fromkeys(step.reading, 0.0)
    by_learner = []
    for name in filter(is_teacher, step.trained):
        is_trained = name == TEACHER and not _is_frozen(run)
        last = steps[name].stop if is_trained else 0
        if is_trained:
            by_learner.append(Cost(name, last * step.trained[name], last * step.trained[name]))
        readers = [student for student, teachers in step.reading.items() if name in teachers]
        count = np.zeros(run.evaluation["step"])
        for student in readers:
            count[steps[student]] += 1
        for student in readers:
            sharing = count[slice(max(last, steps[student].start), steps[student].stop)]
            shares[student] += step.teaching[name] * float((1 / sharing).sum())
    for name, reading in step.reading.items():
        count_of_steps = steps[name].stop - steps[name].start
        training = count_of_steps * step.trained[name]
        teaching = count_of_steps * sum(reading.values())
        by_learner.append(Cost(name, training + shares[name], training + teaching))
    return by_learner


def _is_frozen(run: RunFiles) -> bool:
    return bool(run.config["teacher"].get("frozen"))


def _steps(name: str, evaluation: dict[str, Any]) -> slice:
    """The steps in which a learner's own schedule ran, from the first one to behind the last."""
    facts = evaluation["learners"][name]
    return slice(facts["started_at"], facts.get("finished_at") or evaluation["step"])


def _separately(run: RunFiles) -> str:
    """A sentence about the separate jobs with which this one is compared."""
    first = "" if _is_frozen(run) else "the teacher trained alone, then "
    shared = (
        "Here a finished teacher runs once a step; the students that read it share that cost."
        if _is_frozen(run)
        else ""
    )
    return (
        f"Separately: {first}each student in a job of its own with a forward pass of each "
        f"finished teacher that it reads in every step. {shared}"
    ).strip()


def _untrained(rows: Sequence[dict[str, Any]], teacher: str) -> list[dict[str, Any]]:
    """The steps that do not train the teacher."""
    return [row for row in rows if f"{teacher}/seconds_{BACKWARD}" not in row]


def _finished(rows: Sequence[dict[str, Any]], teacher: str) -> float:
    """The median time of a finished teacher's forward, by the steps that do not train it.

    Where all do, half of its backward stands for it: its forward also computes its losses, and
    their gradients at the vocabulary.
    """
    if untrained := _untrained(rows, teacher):
        return _median(untrained, teacher, FORWARD)
    return min(_median(rows, teacher, FORWARD), _median(rows, teacher, BACKWARD) / 2)


def _rows(run: RunFiles, learner: str, part: str) -> list[dict[str, Any]]:
    """The logged steps in which this part of a learner's step was timed."""
    return [row for row in run.rows if f"{learner}/seconds_{part}" in row]


def _median(rows: Sequence[dict[str, Any]], learner: str, *parts: str) -> float:
    """The median time of these parts of a learner's step; 0 without rows."""
    times = [sum(row.get(f"{learner}/seconds_{part}", 0.0) for part in parts) for row in rows]
    return statistics.median(times) if times else 0.0


def _row(name: str, cost: Cost, timed: bool) -> str:
    saved = cost.separately - cost.here
    cells = [_amount(cost.here, timed), _amount(cost.separately, timed), ""]
    if saved > 0:
        cells[-1] = f"{_amount(saved, timed)} ({percent(saved / cost.separately)})"
    return f"<tr><td>{escape(name)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _amount(amount: float, timed: bool) -> str:
    return duration(amount) if timed else f"{short(amount)} FLOPs"
