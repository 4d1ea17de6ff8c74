"""What one joint job saves: the cost of each learner here, and in separate jobs.

In the usual recipe the teacher is pre-trained alone. Each student then has a job of its own, which
also pays for the forward passes of the finished teacher. Nothing else that students share, such as
reading data, is counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from trainer.learner_names import TEACHER, is_teacher
from trainer.measure.durations import duration
from trainer.measure.parts import BACKWARD, FORWARD, STEP
from trainer.report.words import percent, plain_name, short
from trainer.run_folder.run_files import RunFiles

TIMED = (
    "The time of a step is the median over this run's logged steps on rank 0, without evaluation, "
    "checkpoints and waiting for data."
)
COUNTED = "No step of this run was timed: these are the FLOPs of the models' matrix products."


@dataclass(frozen=True)
class Cost:
    """What a learner costs in this job and separately, in seconds or in FLOPs."""

    learner: str
    here: float
    separately: float


@dataclass(frozen=True)
class StepCosts:
    """The cost of one step in seconds, or in FLOPs where nothing was timed."""

    timed: bool
    own: dict[str, float]  # by learner: forward, backward and update
    reading: dict[str, dict[str, float]]  # by student: each teacher's forward in its steps


def savings_section(run: RunFiles) -> str:
    """The costs side by side; empty until there are results, and without students."""
    found = step_costs(run)
    if found is None:
        return ""
    learners = costs(run, found)
    total = Cost("", sum(one.here for one in learners), sum(one.separately for one in learners))
    rows = "".join(_row(plain_name(one.learner), one, found.timed) for one in learners)
    return (
        '<section class="savings"><h2>Cost</h2><div class="scroll"><table><thead><tr>'
        "<th>learner</th><th>in this job</th><th>separately</th><th>saved</th></tr></thead>"
        f"<tbody>{rows}{_row('together', total, found.timed)}</tbody></table></div>"
        "<p>Separately: the teacher pre-trained alone, then each student in a job of its own with "
        "a forward pass of each finished teacher in every step. "
        f"{TIMED if found.timed else COUNTED}</p></section>"
    )


def step_costs(run: RunFiles) -> StepCosts | None:
    """The cost of a step for each learner; None without results of a teacher and students."""
    learners = run.evaluation["learners"] if run.evaluation else {}
    names = [name for name in run.learners if name in learners]
    teachers = [name for name in names if is_teacher(name)]
    students = [name for name in names if not is_teacher(name)]
    if TEACHER not in names or not students:
        return None
    reading = {
        student: {name: _seconds(run, name, (FORWARD,), beside=student) for name in teachers}
        for student in students
    }
    if all(one[TEACHER] for one in reading.values()):
        own = {name: _seconds(run, name, (FORWARD, BACKWARD, STEP), beside=name) for name in names}
        return StepCosts(True, own, reading)
    tokens = run.last["tokens"] / max(1, run.last["step"])
    flops = {name: tokens * learners[name].get("flops_per_token", 0.0) for name in names}
    if not all(flops.values()):
        return None
    forward = {name: flops[name] / 3 for name in teachers}
    return StepCosts(False, flops, dict.fromkeys(students, forward))


def costs(run: RunFiles, step: StepCosts) -> list[Cost]:
    """The cost of every learner. Here a frozen teacher runs once for all students."""
    assert run.evaluation is not None
    steps = {name: _steps(name, run.evaluation) for name in step.own}
    found = []
    for name in filter(is_teacher, step.own):
        here = pretraining = steps[name] * step.own[name]
        if name != TEACHER or run.config["teacher"].get("frozen"):
            most = max(reading[name] for reading in step.reading.values())
            here, pretraining = steps[name] * most, 0.0
        found.append(Cost(name, here, pretraining))
    for name, reading in step.reading.items():
        own = step.own[name]
        found.append(Cost(name, steps[name] * own, steps[name] * (own + sum(reading.values()))))
    return found


def _steps(name: str, evaluation: dict[str, Any]) -> int:
    facts = evaluation["learners"][name]
    return int((facts.get("finished_at") or evaluation["step"]) - facts["started_at"])


def _seconds(run: RunFiles, learner: str, parts: Sequence[str], beside: str) -> float:
    """The median time of `parts` of a learner's step, where `beside` trained too; 0 if never."""
    there = f"{beside}/seconds_{FORWARD}"
    times = [
        sum(row.get(f"{learner}/seconds_{part}", 0.0) for part in parts)
        for row in run.rows
        if there in row
    ]
    return statistics.median(times) if times else 0.0


def _row(name: str, cost: Cost, timed: bool) -> str:
    saved = cost.separately - cost.here
    share = f" ({percent(saved / cost.separately)})" if saved and cost.separately else ""
    cells = [_amount(cost.here, timed), _amount(cost.separately, timed)]
    cells.append(f"{_amount(saved, timed)}{share}" if saved else "")
    return f"<tr><td>{escape(name)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _amount(amount: float, timed: bool) -> str:
    sign = "-" if amount < 0 else ""
    return sign + (duration(abs(amount)) if timed else f"{short(abs(amount))} FLOPs")
