"""Stored predictions, suites and evaluations on a real SLURM, as a user submits them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.scheduler import queued_jobs
from cluster.status import read_run
from tandem import main
from tests.conftest import TINY_JOB, command_environment
from tests.fork_server import run_command
from tests.slurm.real_slurm import RealSlurm, requeue_soon
from tests.trainer.test_stored_logits import FROZEN, STUDENTS
from tests.trainer.test_suites import write_suite
from tests.waiting import until

SITE = ["--preflight", "false", "--min-free-gb", "0.1", "--time", "0:30:00"]


class Job:
    """A job that `tandem submit WORDS` makes on construction; `folder` has its records."""

    def __init__(self, slurm: RealSlurm, folder: Path, *words: object) -> None:
        answer = CliRunner().invoke(main, ["submit", *map(str, words), *SITE])
        assert answer.exit_code == 0, answer.output
        self.slurm, self.folder = slurm, folder
        self.id = (folder / "submissions/001/jobs").read_text().strip()

    @property
    def events(self) -> list[tuple[str, str]]:
        lines = (self.folder / "slurm.jsonl").read_text().splitlines()
        return [(one["event"], one["reason"]) for one in map(json.loads, lines)]

    @property
    def log(self) -> str:
        return "".join(file.read_text() for file in self.folder.glob("logs/slurm-*.log"))

    def reach(self, file: Path, text: str = "") -> None:
        def reached() -> bool:
            assert self.slurm.job(self.id)["JobState"] in ("PENDING", "RUNNING"), self.log
            return file.exists() and text in file.read_text()

        until(reached, f"{text} in {file}", 240)

    def warn(self) -> None:
        self.slurm.run("scancel", "--batch", "--signal=USR1", self.id)

    def end(self, state: str = "COMPLETED") -> None:
        facts = self.slurm.wait_job(self.id, timeout=400)
        assert facts["JobState"] == state, self.log


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.slow
def test_a_run_is_scored_once_whatever_the_number_of_tasks(
    slurm: RealSlurm, finished: tuple[Path, str]
) -> None:
    folder = finished[0].with_name("tiny-evaluate")
    job = Job(slurm, folder, "evaluate", finished[0], "--ranks-per-node", 3)
    job.end()
    assert job.events == [("start", ""), ("done", "finished")]
    assert job.log.count("\nteacher ") == 1, job.log
    assert "may never run" not in job.log, "srun is given the CPUs of all tasks, which the job has"
    assert read_run(folder, queued_jobs()).state == "finished"


@pytest.mark.slow
def test_a_suite_resumes_after_a_time_limit_and_a_preemption(slurm: RealSlurm, text: Path) -> None:
    """Two processes train each model; the scores are those of an undisturbed suite."""
    write_suite(slurm.root, text)
    suite = ["evaluate", "--suite", "suite.yaml", "big", "small", f"data.root={slurm.root}"]
    suite += ["epochs=150", "checkpoint.every=20", "--out"]
    tasks_epochs = (slurm.root / "suite.yaml").read_text().replace("epochs: 1, ", "")
    (slurm.root / "suite.yaml").write_text(tasks_epochs)
    out = slurm.root / "suite"
    job = Job(slurm, out, *suite, out, "--ranks-per-node", 2)
    job.reach(out / "runs/moods-big-seed1/metrics.jsonl", '"step": 30,')
    job.warn()
    requeue_soon(slurm, job.id, 1)
    job.reach(out / "runs/moods-small-seed1/metrics.jsonl", '"step": 30,')
    urgent = ("sbatch", "--parsable", "-p", "urgent", "-N3", "--exclusive", "--wrap=true")
    slurm.wait_job(slurm.run(*urgent).strip(), "COMPLETED")
    requeue_soon(slurm, job.id, 2)
    job.end()
    assert job.events == [
        *(("start", ""), ("requeue", "the time limit"), ("start", "restart 1")),
        *(("requeue", "preempted"), ("start", "restart 2"), ("done", "finished")),
    ]
    code, _, errors = run_command(
        [*suite, str(slurm.root / "calm"), "--nproc", "2"], command_environment(), 240
    )
    assert code == 0, errors
    calm, disturbed = (
        json.loads((folder / "suite.json").read_text()) for folder in (slurm.root / "calm", out)
    )
    for model in ("big", "small"):
        scores = [found[model]["tasks"]["moods"]["by_seed"] for found in (calm, disturbed)]
        assert scores[0] == scores[1]
        assert len([*out.glob(f"runs/moods-{model}-seed1/attempts/*.json")]) == 2


@pytest.mark.slow
def test_predictions_are_stored_and_read_in_one_job(
    slurm: RealSlurm, corpus: Path, finished: tuple[Path, str]
) -> None:
    """The warning comes while they are stored, on two nodes."""
    teacher = finished[0] / "exports/teacher"
    words = [TINY_JOB, f"data.path={corpus}", "output_dir=runs", "steps=300", *STUDENTS, *FROZEN]
    words += [f"teacher.init.pretrained={teacher}", "teacher.stored.path=targets"]
    run = slurm.root / "runs/tiny"
    job = Job(slurm, run, *words, "--store", "--nodes", 2)
    job.reach(slurm.root / "targets/lock")
    job.warn()
    requeue_soon(slurm, job.id, 1)
    job.end()
    assert job.events == [
        *(("start", ""), ("requeue", "the time limit"), ("start", "restart 1")),
        ("done", "finished"),
    ]
    assert "the same command resumes" in job.log
    assert job.log.count("largest logits of 300 batches are in targets") == 1
    assert (run / "evaluation.json").exists()


@pytest.mark.slow
def test_predictions_are_stored_alone(
    slurm: RealSlurm, corpus: Path, finished: tuple[Path, str]
) -> None:
    teacher = finished[0] / "exports/teacher"
    words = ["store", TINY_JOB, f"data.path={corpus}", "output_dir=runs", *STUDENTS, *FROZEN]
    words += [f"teacher.init.pretrained={teacher}", "teacher.stored.path=targets", "steps=4"]
    folder = slurm.root / "runs/tiny-store"
    job = Job(slurm, folder, *words, "--nodes", 2)
    job.end()
    assert job.events == [("start", ""), ("done", "finished")]
    assert "largest logits of 4 batches are in targets" in job.log
    assert not (slurm.root / "runs/tiny").exists()
