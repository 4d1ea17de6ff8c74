"""Rollback: a return to a checkpoint that skips some batches, once."""

from __future__ import annotations

import dataclasses

import pytest
import torch.distributed as dist

import configs
from data_pipeline import DataError
from tests.distributed import run_distributed
from tests.trainer.jobs import curve, run, tiny_job
from trainer.checkpoint.attempts import published
from trainer.checkpoint.reader import Checkpoint
from trainer.config import JobConfig
from trainer.errors import CheckpointError, TrainingError
from trainer.job import step_shape
from trainer.learner_life import InitConfig
from trainer.run_folder.folder import RunFolder
from trainer.watch.guard import RollbackConfig, batch_number, first_step, proposal

FIRST, SECOND = RollbackConfig(2, [3, 5]), RollbackConfig(6, [9, 10])


def test_batches_in_the_ranges_are_passed_over():
    assert [batch_number(step, []) for step in range(3)] == [0, 1, 2]
    assert [batch_number(step, [FIRST]) for step in range(6)] == [0, 1, 2, 5, 6, 7]
    both = [batch_number(step, [SECOND, FIRST]) for step in range(9)]
    assert both == [0, 1, 2, 5, 6, 7, 8, 10, 11]
    back_only = RollbackConfig(4)
    assert [batch_number(step, [back_only]) for step in range(6)] == list(range(6))


def test_a_phase_begins_for_models_with_the_step_that_reads_its_first_batch(
    corpus, tmp_path, monkeypatch
):
    phases = [3, 4, 7, 9, 10, 12]
    for rollbacks in ([], [FIRST], [FIRST, SECOND]):
        for batch in range(14):
            step = first_step(batch, rollbacks)
            assert batch_number(step, rollbacks) >= batch
            assert step == 0 or batch_number(step - 1, rollbacks) < batch
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    section = [{"from_step": step, "masking": {"rate": 0.1}} for step in phases]
    words = f"data.phases={section}", "rollback=[{checkpoint: 2, skip: [3, 5]}]"
    shape = step_shape(tiny_job(corpus, tmp_path, *words), {})
    assert [step for step, _ in shape.phases] == [3, 3, 5, 7, 8, 10]


def test_the_way_out_is_what_the_command_line_takes(corpus, tmp_path):
    text = proposal([FIRST, RollbackConfig(4)], 6, 9)
    assert text == (
        "rollback=[{checkpoint: 2, skip: [3, 5]}, {checkpoint: 4, skip: null}, "
        "{checkpoint: 6, skip: [8, 11]}]"
    )
    job = tiny_job(corpus, tmp_path, text)
    assert job.rollback == [FIRST, RollbackConfig(4), RollbackConfig(6, [8, 11])]
    around = tiny_job(corpus, tmp_path, proposal([FIRST], 2, 5))
    assert around.rollback == [FIRST, RollbackConfig(2, [2, 3]), RollbackConfig(2, [5, 7])]
    assert [batch_number(step, around.rollback) for step in range(4)] == [0, 1, 7, 8]


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (
            "[{checkpoint: 4, skip: [3, 5]}]",
            "rollback[0].skip: the checkpoint of step 4 has trained on",
        ),
        ("[{checkpoint: 2, skip: [5, 3]}]", "rollback[0].skip: must be in ascending order"),
        ("[{checkpoint: 2, skip: [5, 8]}, {checkpoint: 2, skip: [7, 9]}]", "must not overlap"),
    ],
)
def test_entries_that_cannot_be_are_refused(corpus, tmp_path, entries, reason):
    with pytest.raises(configs.ConfigError) as failed:
        tiny_job(corpus, tmp_path, f"rollback={entries}")
    assert reason in str(failed.value)


def failure(job: JobConfig) -> str:
    with pytest.raises((TrainingError, CheckpointError, DataError)) as failed:
        run(job)
    return str(failed.value)


def jobs(corpus, runs):
    """A run rolled back from step 6 to 2 and interrupted at 5; and one without a rollback."""
    job = tiny_job(corpus, runs, "name=recovered", "checkpoint.keep=9")
    run(job, stop_after=6)
    before = RunFolder.of(job).config.read_text()
    nowhere = failure(dataclasses.replace(job, rollback=[RollbackConfig(3, [3, 5])]))
    with_weights = dataclasses.replace(
        job.students["tinybert"], init=InitConfig(pretrained="nowhere")
    )
    fresh = {**job.students, "fresh": with_weights}
    gone = failure(dataclasses.replace(job, rollback=[FIRST], students=fresh))
    assert RunFolder.of(job).config.read_text() == before
    assert published(RunFolder.of(job).checkpoints) == [2, 4, 6], "nothing was gone back to"
    recovered = dataclasses.replace(job, rollback=[FIRST])
    folder = run(recovered, stop_after=5)
    steps = published(folder.checkpoints)
    forgotten = failure(job)
    if dist.get_rank() == 0:  # as a power loss may leave it
        rows = folder.metrics.read_bytes()
        folder.metrics.write_bytes(rows[: len(rows) // 2] + bytes(1000))
    dist.barrier()
    run(recovered)
    run(dataclasses.replace(recovered, name="straight"))
    later = failure(dataclasses.replace(recovered, rollback=[FIRST, RollbackConfig(12, [20, 21])]))
    return steps, [nowhere, later, gone], forgotten


@pytest.fixture(scope="module")
def launched(corpus, tmp_path_factory):
    runs = tmp_path_factory.mktemp("recovery")
    return runs, run_distributed(jobs, 2, corpus, runs)


@pytest.mark.slow
def test_it_goes_back_once_and_is_as_if_it_had_never_been_elsewhere(launched):
    """Interrupted after the rollback, it resumes from there, with its metrics."""
    runs, results = launched
    assert [steps for steps, _, _ in results] == [[2, 4, 5]] * 2  # 6 counts no more
    recovered, straight = RunFolder(runs / "recovered"), RunFolder(runs / "straight")
    ours, theirs = (
        [row for row in curve(folder) if row[1] != "rollbacks"] for folder in (recovered, straight)
    )
    assert ours == theirs
    assert len({step for step, _, _ in ours}) == 8
    state = Checkpoint(recovered.checkpoints, 8).trainer_state
    assert state["rolled_back"] == [{"checkpoint": 2, "skip": [3, 5]}]


@pytest.mark.slow
def test_what_cannot_be_done_is_one_line(launched):
    for _, (nowhere, later, gone), forgotten in launched[1]:
        assert "no checkpoint of step 3; there are: 2, 4, 6" in nowhere
        assert "no checkpoint of step 12; there are: 2, 4, 5, 6, 8" in later
        assert "rollback: the run has applied [{checkpoint: 2, skip: [3, 5]}]; keep" in forgotten
        assert "nowhere" in gone
        assert "\n" not in nowhere + later + forgotten + gone
