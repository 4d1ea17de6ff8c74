"""The report's savings of a joint job, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from trainer.report.savings import costs, savings_section, step_costs
from trainer.run_folder.run_files import RunFiles

STEPS = 100


def run(rows: list[dict[str, float]], frozen: bool = False) -> RunFiles:
    """A finished run of 100 steps; `late` trains from step 60 to 90, `small` in all steps."""
    facts = {
        "teacher": {"started_at": 0, "finished_at": None, "flops_per_token": 900.0},
        "students/small": {"started_at": 0, "finished_at": None, "flops_per_token": 300.0},
        "students/late": {"started_at": 60, "finished_at": 90, "flops_per_token": 600.0},
    }
    students = [name.removeprefix("students/") for name in facts if name != "teacher"]
    config = {"teacher": {"frozen": frozen}, "students": {name: {} for name in students}}
    return RunFiles("demo", config, "", rows, {"step": STEPS, "learners": facts})


def timed(step: int, *, late: bool, frozen: bool = False) -> dict[str, float]:
    """A logged step; step 10 is slow."""
    slow = 50.0 if step == 10 else 1.0
    row = {"step": step, "tokens": 10 * step, "seconds": float(step)}
    row["teacher/seconds_forward"] = slow * 3.0
    if not frozen:
        row |= {"teacher/seconds_backward": 6.0, "teacher/seconds_step": 1.0}
    for name in ["small", *(["late"] if late else [])]:
        parts = {"forward": 1.0, "backward": 2.0, "step": 0.5, "communication": 0.25}
        row |= {f"students/{name}/seconds_{part}": value for part, value in parts.items()}
    return row


def test_times_are_medians_of_the_logged_steps():
    finished = run([timed(step, late=60 < step <= 90) for step in range(10, 101, 10)])
    step = step_costs(finished)
    assert step is not None
    assert step.timed
    teacher, small, late = costs(finished, step)
    assert teacher.here == teacher.separately == STEPS * 10.0  # communication is in the others
    assert (small.here, small.separately) == (STEPS * 3.5, STEPS * (3.5 + 3.0))
    assert (late.here, late.separately) == (30 * 3.5, 30 * (3.5 + 3.0))
    page = savings_section(finished)
    assert "<td>small</td><td>5m 50s</td><td>10m 50s</td><td>5m 0s (46.2%)</td>" in page
    assert "<td>teacher</td><td>16m 40s</td><td>16m 40s</td><td></td>" in page
    together = 1000 + 650 + 195
    assert f"6m 30s ({390 / together:.1%})</td>" in page
    assert "this run's logged steps" in page


def test_a_finished_teacher_computes_no_losses():
    """Their part of the forward pass of one that trains in all steps, 4 seconds, is not saved."""
    rows = [timed(step, late=True) for step in range(20, 101, 10)]
    for row in rows:
        row["teacher/seconds_forward"] = 7.0
    finished = run(rows)
    teacher, small, _ = costs(finished, step_costs(finished))
    assert teacher.here == teacher.separately == STEPS * 14.0
    assert small.separately == STEPS * (3.5 + 3.0)


def test_a_frozen_teacher_is_read_once_here_and_by_each_student_separately():
    """It is in no row: the students that read it in a step share its pass."""
    rows = [timed(step, late=True, frozen=True) for step in range(20, 101, 10)]
    finished = run(rows, frozen=True)
    small, late = costs(finished, step_costs(finished))
    assert (small.learner, late.learner) == ("students/small", "students/late")
    assert small.here == pytest.approx(STEPS * 3.5 + 70 * 3.0 + 30 * 1.5)
    assert late.here == pytest.approx(30 * (3.5 + 1.5))
    saved = sum(one.separately - one.here for one in (small, late))
    assert saved == pytest.approx(30 * 3.0)  # the steps in which both read it
    page = savings_section(finished)
    assert "<td>teacher</td>" not in page
    assert "the teacher trained alone" not in page
    assert "the students that read it share that cost" in page


@pytest.mark.parametrize("times", [True, False], ids=["timed", "counted"])
def test_no_teacher_is_charged_to_a_student_that_reads_none(times: bool) -> None:
    rows = [timed(step, late=True, frozen=True) for step in range(20, 101, 10)]
    finished = run(rows if times else [{"step": 100, "tokens": 1000, "seconds": 1.0}], frozen=True)
    learners = finished.evaluation["learners"]
    learners["students/small"]["listens_to"] = []
    learners["students/late"]["listens_to"] = ["mean"]
    small, late = costs(finished, step_costs(finished))
    assert small.here == small.separately
    assert late.here == pytest.approx(late.separately), "the one that reads it pays for it"
    assert savings_section(finished) == "", "nothing is saved"


def test_a_teacher_with_a_budget_goes_on_at_the_cost_of_a_forward():
    """It trains for 50 steps; `late` ends at step 90, `small` at 80."""
    rows = [timed(step, late=step > 60, frozen=step > 50) for step in range(20, 91, 10)]
    finished = run(rows)
    learners = finished.evaluation["learners"]
    learners["teacher"]["finished_at"] = 50
    learners["students/small"]["finished_at"] = 80
    for row in rows:
        if row["step"] > 50:
            row["teacher/seconds_forward"] = 2.0
    teacher, small, late = costs(finished, step_costs(finished))
    assert teacher.here == teacher.separately == 50 * 10.0
    assert small.here == pytest.approx(80 * 3.5 + 2.0 * (10 + 20 / 2))
    assert late.here == pytest.approx(30 * 3.5 + 2.0 * (10 + 20 / 2))
    assert late.separately == 30 * (3.5 + 2.0)
    assert small.separately == 80 * (3.5 + 2.0)


@pytest.mark.parametrize("times", [True, False], ids=["timed", "counted"])
def test_a_stored_teacher_costs_nothing_here_or_separately(times: bool) -> None:
    rows = [timed(step, late=60 < step <= 90, frozen=True) for step in range(20, 101, 10)]
    for row in rows:
        del row["teacher/seconds_forward"]
    finished = run(rows if times else [{"step": 100, "tokens": 1000, "seconds": 1.0}], frozen=True)
    finished.config["teacher"]["stored"] = {"path": "stored"}
    small, late = costs(finished, step_costs(finished))
    assert small.here == small.separately
    assert late.here == late.separately
    assert savings_section(finished) == ""


def test_without_timings_the_models_flops_are_compared_and_the_page_says_so():
    finished = run([{"step": STEPS, "tokens": 1000, "seconds": 5.0}])
    step = step_costs(finished)
    assert step is not None
    assert not step.timed
    teacher, small, _ = costs(finished, step)
    assert teacher.here == 1000 * 900.0
    assert (small.here, small.separately) == (1000 * 300.0, 1000 * (300.0 + 900.0 / 3))
    page = savings_section(finished)
    assert "<td>600k FLOPs</td><td>300k FLOPs (50.0%)</td>" in page
    assert "No step of this run was timed" in page


def test_a_teacher_alone_saves_nothing():
    finished = run([timed(10, late=False)])
    finished.config["students"].clear()
    assert savings_section(finished) == ""
