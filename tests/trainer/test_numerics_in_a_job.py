"""Precisions, optimizers, offload and a deadline, from the command line."""

from __future__ import annotations

import json

import pytest

import configs
from commands.training import final_results
from configs import ConfigError
from tests.conftest import TINY_JOB, tandem
from tests.test_files_read_back import EVALUATION
from trainer.config import JobConfig
from trainer.run_folder import metrics

SETTINGS = [
    "steps=1000000",
    "hours=0.0015",
    "evaluation.every=1000000",
    "checkpoint.every=1000000",
    "teacher.precision=fp16",
    "teacher.zero_stage=3",
    "teacher.offload=parameters",
    "teacher.loss_scale.initial=262144",
    "students.distilbert.start=null",
    "students.distilbert.precision=bf16",
    "students.distilbert.optimizer.kind=lamb",
    "students.distilbert.zero_stage=2",
    "students.distilbert.offload=optimizer",
    "students.tinybert.precision=bf16_weights",
    "students.tinybert.average.kind=ema",
    "students.tinybert.schedule.kind=wsd",
    "students.tinybert.budget.hours=0.0005",
]


def run(corpus, runs):
    done = tandem(
        "train", TINY_JOB, f"data.path={corpus}", f"output_dir={runs}", *SETTINGS, "--nproc", 2
    )
    assert done.returncode == 0, done.stderr
    return metrics.read(runs / "tiny" / "metrics.jsonl")


@pytest.mark.slow
def test_a_job_of_every_precision_ends_at_its_deadline(corpus, tmp_path):
    rows = run(corpus, tmp_path)
    steps = [row for row in rows if "teacher/loss" in row]
    rates = [row["teacher/lr"] for row in steps]
    # It has been warmed up where the machine is fast enough; from there it falls by the clock.
    assert rates[-1] < max(rates) * (1 if len(rates) > 1 else 2)
    assert steps[0]["teacher/loss_scale"] == 2**17
    assert steps[0]["teacher/overflows"] == 1
    assert steps[0]["teacher/skipped_steps"] == 0
    taught = [row for row in steps if "students/tinybert/loss" in row]
    assert len(taught) < len(steps) or len(steps) == 1
    assert str(run(corpus, tmp_path)) == str(rows)  # its time is up; a norm may be nan
    assert len(list(tmp_path.glob("tiny/attempts/*.json"))) == 1, "it is not started again"


def test_hours_that_are_used_up_end_a_run_until_there_are_more(tmp_path):
    (tmp_path / "tiny").mkdir()
    results = {**EVALUATION, "step": 7, "seconds": 3600.5, "test": {}}
    (tmp_path / "tiny/evaluation.json").write_text(json.dumps(results))
    for words, ended in ((["hours=1"], True), (["hours=1.1"], False), (["steps=7"], True)):
        places = ["data.path=c", f"output_dir={tmp_path}"]
        job = configs.load(str(TINY_JOB), JobConfig, "job", [*places, *words])
        assert (final_results(job) is not None) == ended


def test_hours_are_positive():
    with pytest.raises(ConfigError, match="hours: must be positive"):
        configs.load(str(TINY_JOB), JobConfig, "job", ["hours=0"])
