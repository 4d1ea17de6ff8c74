"""A run that diverged, or had nothing to learn from, is no success."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import tandem
from tests.failing import one_line
from tests.trainer.test_sentence_tasks import job_of_moods, write  # noqa: F401 - a fixture
from trainer.learners.state import LearnerState
from trainer.lifecycle.in_progress import _why_failed
from trainer.report.table import student_table
from trainer.run_folder.folder import RunFolder
from trainer.watch.guard import Guard, GuardConfig

ALONE = ["students=null", "checkpoint.every=100"]


def state(taken: int, skipped: int, in_a_row: int = 0, idle: int = 0, overflows: int = 0):
    guard = Guard(in_a_row=in_a_row, skipped={"loss not finite": skipped} if skipped else {})
    return LearnerState(
        0, guard=guard, idle_steps=idle, overflows=overflows,
        finished_at=taken + skipped + overflows,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("counters", "why"),
    [
        (state(14, 0), ""),
        (state(7, 7), ""),
        (state(6, 8), "8 of its 14 steps were skipped (loss not finite: 8), more than guard"),
        (state(13, 1, in_a_row=1), "its last step was skipped, and 1 of its 14 steps"),
        (state(0, 0, overflows=3), "none of its 3 steps was taken"),
        (state(14, 0, idle=14), "the gradient was zero in each of its 14 steps"),
        (state(14, 0, idle=13), ""),
        (state(0, 0), ""),
    ],
)
def test_when_training_is_no_success(counters, why) -> None:
    found = _why_failed(GuardConfig(), counters, counters.finished_at)
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_a_run_that_skips_too_many_steps_fails_each_time_it_is_started(job) -> None:
    """Every loss above the mean of the two before it counts as a spike here."""
    guard = "{sigmas: 1.0e-6, window: 2, max_skipped_fraction: 0.1, max_consecutive_skips: 99}"
    words = ["train", job, "name=wild", "steps=14", *ALONE, f"teacher.guard={guard}"]
    words += ["teacher.optimizer.learning_rate=1e-9"]
    first, again = tandem(*words), tandem(*words)
    for ended in (first, again):
        assert ended.returncode == 1
        assert "of its 14 steps were skipped (loss spike: " in one_line(ended.stderr)
    run = RunFolder(job.parent / "runs" / "wild")
    assert not run.evaluation.exists()
    assert not run.export("teacher").exists()


def test_rows_without_labels_are_nothing_to_learn(job, tmp_path) -> None:
    table: Path = tmp_path / "bare.tsv"
    write(table, ["the list\t"] * 20)
    words = ["train", job, "name=bare", "steps=3", *ALONE, f"data.train={table}"]
    settings = "{unlabelled: true, labels: [bright, dull]}"
    ended = tandem(*words, f"teacher.objective={{single_sentence: {settings}}}")
    assert ended.returncode == 1
    assert "no example has a label" in one_line(ended.stderr)


def test_steps_taken_and_skipped_stand_in_the_results(job) -> None:
    words = ["train", job, "name=tame", "steps=4", *ALONE]
    assert tandem(*words).returncode == 0
    results = json.loads((job.parent / "runs" / "tame" / "evaluation.json").read_text())
    facts = results["learners"]["teacher"]
    assert (facts["steps_taken"], facts["steps_skipped"]) == (4, 0)
    facts["steps_skipped"] = 3
    assert "4 + 3 skipped" in student_table(results)
