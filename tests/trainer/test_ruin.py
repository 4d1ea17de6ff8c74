"""Weights that one step has ruined: the job's advice leads to a run that trains."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.distributed import run_distributed
from tests.trainer.jobs import run, tiny_job
from trainer.checkpoint.attempts import published
from trainer.checkpoint.reader import Checkpoint
from trainer.errors import TrainingError
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder
from trainer.watch.guard import RollbackConfig, recovery_advice

JOB = (
    *("name=ruined", "students=null", "steps=14", "checkpoint.every=2", "checkpoint.keep=2"),
    *("evaluation.every=100", "teacher.zero_stage=3"),
    "teacher.guard={sigmas: 3.0, window: 4, max_consecutive_skips: 2}",
)


def jobs(corpus, runs):
    """Five steps; a restart at a huge learning rate, which fails; then the advised rollback."""
    job = tiny_job(corpus, runs, *JOB)
    folder = run(job, stop_after=5)
    optimizer = dataclasses.replace(job.teacher.optimizer, learning_rate=1e6)
    teacher = dataclasses.replace(job.teacher, optimizer=optimizer)
    with pytest.raises(TrainingError) as failed:
        run(dataclasses.replace(job, teacher=teacher))
    found = {step: Checkpoint(folder.checkpoints, step) for step in published(folder.checkpoints)}
    suspect = {step: checkpoint.suspect for step, checkpoint in found.items()}
    (advice,) = re.findall(r"'(rollback=.*)'", str(failed.value))
    run(tiny_job(corpus, runs, *JOB, advice))
    return str(failed.value), suspect, Checkpoint(folder.checkpoints, 14).suspect


@pytest.fixture(scope="module")
def launched(corpus, tmp_path_factory):
    runs = tmp_path_factory.mktemp("ruin")
    return RunFolder(runs / "ruined"), run_distributed(jobs, 2, corpus, runs)


@pytest.mark.slow
def test_the_ruined_checkpoint_is_marked_kept_and_passed_over(launched):
    for message, suspect, _ in launched[1]:
        assert list(suspect) == [4, 5, 6]
        assert (suspect[4], suspect[5]) == ("", "")
        assert re.match(r"teacher: the norm of its weights is \S+ times", suspect[6])
        assert "teacher skipped 3 steps in a row (loss not finite at step 9)" in message
        assert "the checkpoint of step 6 is suspect" in message
        assert message.endswith("'rollback=[{checkpoint: 5, skip: [5, 9]}]'")


@pytest.mark.slow
def test_what_is_advised_leads_to_a_run_that_trains(launched):
    folder, results = launched
    assert {suspect for _, _, suspect in results} == {""}
    rows = [row for row in metrics.read(folder.metrics) if "teacher/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 15))
    assert rows[-1]["teacher/loss"] < rows[0]["teacher/loss"]
    assert rows[-1]["teacher/skipped_steps"] == 0


def test_the_ways_out():
    done = [RollbackConfig(2, [3, 5])]
    here = "start again with a lower learning_rate, or without the batches since step"
    assert recovery_advice([], 6, 6, 9) == f"{here} 6: 'rollback=[{{checkpoint: 6, skip: [6, 9]}}]'"
    assert recovery_advice([], 0, None, 9).startswith(f"{here} 0: "), "nothing has been saved yet"
    assert recovery_advice([], 6, None, 9).endswith("'name=NEW'")
    back = recovery_advice(done, 6, 4, 9)
    assert "the checkpoint of step 6 is suspect: its weights were ruined before" in back
    assert back.endswith(
        "'rollback=[{checkpoint: 2, skip: [3, 5]}, {checkpoint: 4, skip: [6, 11]}]'"
    )
