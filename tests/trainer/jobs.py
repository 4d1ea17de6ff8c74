"""Whole jobs on the ranks of a test: the real loop, from a config to the run folder."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import configs
from tests.conftest import TINY_JOB
from trainer.checkpoint.attempts import Owner
from trainer.config import JobConfig
from trainer.control import RunContext
from trainer.evaluation import final_scores as evaluation
from trainer.job import Job
from trainer.job_data.examples import with_examples
from trainer.learner_config import LearnerConfig
from trainer.lifecycle.start import start_run
from trainer.measure import Startup
from trainer.run import Outcome, finalize, train
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder
from trainer.watch.ranks import HangWatch, on_rank_0, run_on_rank_zero


def tiny_job(corpus: Path, runs: Path, *overrides: str) -> JobConfig:
    """The tiny job on this corpus, with ``key=value`` changes."""
    places = [f"data.path={corpus}", f"output_dir={runs}"]
    return configs.load(str(TINY_JOB), JobConfig, "job", [*places, *overrides])


def with_students(config: JobConfig, **students: LearnerConfig) -> JobConfig:
    """The same job with these students."""
    return dataclasses.replace(config, students=students)


def run(config: JobConfig, stop_after: int | None = None) -> RunFolder:
    """Train or resume, to the end or to a stop with a save after a given step. Collective."""
    attempt = on_rank_0(lambda: start_run(config, Owner.here())).attempt

    def stop_requested() -> bool:
        return job.state.step + 1 == stop_after

    around = RunContext.of(config, attempt, dist.get_rank(), stop_requested, Startup())
    with Job(config, torch.device("cpu"), around) as job:
        outcome = train(job)
    assert outcome is (Outcome.STOPPED if stop_after else Outcome.FINISHED)
    return RunFolder.of(config)


def finish(folder: RunFolder) -> int:
    """Write scores, exports and report on rank 0; returns this rank's heartbeats. Collective."""
    evaluation.SPEED_SECONDS = 0.0
    watch = HangWatch(folder.rank_log(dist.get_rank()), seconds=600.0)
    run_on_rank_zero(partial(finalize, folder), watch)
    return watch.heartbeats


def load(job: Path, *overrides: str) -> JobConfig:
    """The job in a file, completed from its examples."""
    return with_examples(configs.load(str(job), JobConfig, "job", overrides))


def finished_run(job: Path, *overrides: str) -> str:
    """The folder of the finished run of a job on examples. Collective."""
    folder = run(load(job, *overrides))
    finish(folder)
    return str(folder.path)


def stopped_and_resumed(job: Path, runs: Path) -> list[tuple[float, str, float]]:
    """The record of a run on examples that stops and resumes. Collective."""
    again = load(job, f"output_dir={runs}", "name=again")
    run(again, stop_after=13)
    return curve(run(again))


def curve_in(job: Path, runs: Path) -> list[tuple[float, str, float]]:
    """The record of a job on examples that runs in this folder. Collective."""
    return curve(run(load(job, f"output_dir={runs}")))


def assert_same_losses(folder: RunFolder, other: list[tuple[float, str, float]]) -> int:
    """Whether a run has the losses of another, but for rounding; returns how many these are."""
    values = {(step, name): value for step, name, value in curve(folder)}
    compared = [(step, name, value) for step, name, value in other if name.endswith("/loss")]
    for step, name, value in compared:
        assert values[step, name] == pytest.approx(value, rel=2e-4), (step, name)
    return len(compared)


def curve(folder: RunFolder, learner: str = "") -> list[tuple[float, str, float]]:
    """All reproducible values in the record of a learner, or of all: step, column, value."""
    return [
        (row["step"], key, value)
        for row in metrics.read(folder.metrics)
        for key, value in row.items()
        if not metrics.is_measured(key) and learner in key
    ]
