"""The real training job on a real SLURM: two nodes over gloo, disturbed in different ways.

Whatever happens to it, the losses equal those of an undisturbed run to the last bit.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import configs
from cluster.config import ClusterConfig
from cluster.slurm import SOURCE, plan_job, submit
from tandem import main
from tests.conftest import TINY_JOB, tandem
from tests.slurm.real_slurm import RealSlurm, requeue_soon
from tests.waiting import until

KEY = "0123456789abcdef0123456789abcdef01234567"
SITE = ClusterConfig(
    nodes="2", min_free_gb=0.1, preflight=False, variables={"OMP_NUM_THREADS": "1"}
)


class Training:
    """A run of the tiny job: a teacher and two students, one rank on each of two nodes."""

    def __init__(
        self,
        slurm: RealSlurm,
        corpus: Path,
        name: str,
        site: ClusterConfig = SITE,
        steps: int = 40,
        *changes: str,
    ) -> None:
        from trainer.config import JobConfig

        self.slurm = slurm
        self.run = slurm.root / "runs" / name
        overrides = [f"name={name}", f"data.path={corpus}", f"steps={steps}", "checkpoint.every=5"]
        overrides += changes
        config = configs.load(str(TINY_JOB), JobConfig, "job", overrides)
        self.id = submit(plan_job(name, self.run, site), site, configs.dump(config))[0]

    @property
    def losses(self) -> dict[int, dict[str, float]]:
        return losses(self.run)

    def reach(self, step: int) -> None:
        file = self.run / "metrics.jsonl"

        def reached() -> bool:
            assert self.slurm.job(self.id)["JobState"] in ("PENDING", "RUNNING"), self.log
            return file.exists() and f'"step": {step},' in file.read_text()

        until(reached, f"step {step}", 240)

    def requeue_soon(self, restarts: int) -> None:
        """Skip SLURM's delay before a requeued job starts again."""
        requeue_soon(self.slurm, self.id, restarts)

    @property
    def events(self) -> list[tuple[str, str]]:
        lines = (self.run / "slurm.jsonl").read_text().splitlines()
        return [(one["event"], one["reason"]) for one in map(json.loads, lines)]

    def end(self) -> None:
        facts = self.slurm.wait_job(self.id, timeout=400)
        assert facts["JobState"] == "COMPLETED", self.log

    @property
    def log(self) -> str:
        return "".join(file.read_text() for file in self.run.glob("logs/slurm-*.log"))


def losses(run: Path) -> dict[int, dict[str, float]]:
    """Every learner's losses by step, in training and held-out."""
    found: dict[int, dict[str, float]] = {}
    for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        named = {key: value for key, value in row.items() if key.endswith("/loss")}
        assert not named.keys() & found.get(row["step"], {}).keys(), "a step is logged twice"
        found.setdefault(row["step"], {}).update(named)
    return found


def warn(training: Training) -> None:
    training.slurm.run("scancel", "--batch", "--signal=USR1", training.id)


@pytest.mark.slow
def test_a_run_has_one_job_until_it_is_stopped(slurm: RealSlurm, corpus: Path) -> None:
    """A second start is refused and takes nothing from the first, which resumes after its limit.

    `tandem stop` from outside the job is final: saved, ended, not requeued.
    """
    site = dataclasses.replace(SITE, nodes="1")
    training = Training(slurm, corpus, "stopped", site, steps=100_000)
    training.reach(13)
    by_hand = tandem("train", training.run / "config.yaml", f"output_dir={training.run.parent}")
    assert by_hand.returncode == 1
    refusal = f"this run is already running (SLURM job {training.id}, process "
    assert refusal in by_hand.stderr
    again = ("sbatch", "--parsable", str(training.run / "submissions/001/job.sbatch"))
    slurm.wait_job(slurm.run(*again).strip(), "FAILED", timeout=100)
    event, reason = training.events[-1]
    assert event == "final"
    assert refusal in reason
    warn(training)
    training.requeue_soon(1)
    attempts = training.run / "attempts"
    until(lambda: len(list(attempts.glob("*.json"))) == 2, "the second attempt", 120)
    answer = CliRunner().invoke(main, ["stop", str(training.run)])
    assert answer.exit_code == 0, answer.output
    slurm.wait_job(training.id, timeout=100)
    assert slurm.job(training.id)["Restarts"] == "1"
    until(lambda: slurm.ends(training.id) == ["PENDING", "CANCELLED"], "the states in accounting")
    assert training.events[-3:] == [
        *(("requeue", "the time limit"), ("start", "restart 1")),
        ("final", "stopped on request"),
    ]


def power_off(training: Training) -> None:
    training.slurm.power_off("n2")
    training.slurm.declare_down("n2")


def test_two_nodes_train_as_two_processes_do(
    slurm: RealSlurm, corpus: Path, finished: tuple[Path, str]
) -> None:
    """The teacher, which is the same with and without students, since each of them costs 3 s."""
    training = Training(slurm, corpus, "tiny", SITE, 8, "students=null")
    training.end()
    teacher = {
        step: {name: loss for name, loss in row.items() if "teacher/" in name}
        for step, row in losses(finished[0]).items()
    }
    assert len(teacher[8]) == 2
    assert training.losses == teacher
    assert training.events == [("start", ""), ("done", "finished")]


@pytest.mark.slow
def test_losses_are_those_of_an_undisturbed_run(
    slurm: RealSlurm, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warned of its time limit, then deprived of a node; a key in the environment stays secret."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    calm = Training(slurm, corpus, "calm")
    calm.end()
    assert sorted(calm.losses) == list(range(1, 41))
    training = Training(slurm, corpus, "disturbed")
    for restarts, (step, disturb) in enumerate([(8, warn), (23, power_off)], start=1):
        training.reach(step)
        disturb(training)
        training.requeue_soon(restarts)
    training.end()
    assert training.losses == calm.losses
    assert training.events == [
        *(("start", ""), ("requeue", "the time limit"), ("start", "restart 1")),
        *(("start", "restart 2"), ("done", "finished")),  # the one before died with its node
    ]
    assert slurm.job(training.id)["NodeList"] == "n[1,3]"
    files = [path for path in training.run.rglob("*") if path.is_file()]
    assert {".sbatch", ".json", ".log", ".jsonl"} <= {path.suffix for path in files}
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


@pytest.mark.slow
def test_a_stale_job_cannot_damage_its_requeued_copy(slurm: RealSlurm, corpus: Path) -> None:
    """n1 is cut off from all but the disk, and keeps training while SLURM restarts the job."""
    site = dataclasses.replace(SITE, nodes="1", ranks_per_node=2)
    steps = 600  # so many that the stale job is still at it when its copy begins
    calm = Training(slurm, corpus, "calm", site, steps)
    calm.end()
    training = Training(slurm, corpus, "stale", site, steps)
    training.reach(13)
    first = slurm.job(training.id)["NodeList"]
    slurm.cut_off(first)
    until(lambda: slurm.job(training.id)["Restarts"] == "1", "the requeue", 60)
    attempts = training.run / "attempts"
    until(lambda: len(list(attempts.glob("*.json"))) == 2, "the second attempt", 120)
    training.end()
    facts = slurm.job(training.id)
    assert (facts["Restarts"], facts["NodeList"] == first) == ("1", False)
    assert training.losses == calm.losses
    log = (training.run / "logs/rank-000.log").read_text()
    assert "attempt 2 of this run has begun" in log


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("bindfs"), reason="needs bindfs")
def test_nodes_that_do_not_see_at_once_what_others_make(slurm: RealSlurm, corpus: Path) -> None:
    """As over NFS. Both ranks save, and a stop from a third node is seen and answered."""
    runs = slurm.root / "runs"
    runs.mkdir()
    for node in slurm.nodes:
        slurm.cache_names(node, runs, seconds=12)
    training = Training(slurm, corpus, "cached", steps=100_000)
    training.reach(13)
    assert slurm.job(training.id)["NodeList"] == "n[1-2]"
    slurm.inside("n3", sys.executable, str(SOURCE / "tandem.py"), "stop", str(training.run))
    slurm.wait_job(training.id)
    assert training.events == [("start", ""), ("final", "stopped on request")]
    assert "was not written" not in training.log
    assert len(list(training.run.glob("checkpoints/step-*/*/rank-00001.safetensors"))) > 1


@pytest.mark.slow
def test_an_array_of_seeds_and_a_chain(
    slurm: RealSlurm, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user submits them. The chain's first job is warned; the second ends the run."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    site = ["--nodes", "1", "--preflight", "false", "--min-free-gb", "0.1", "--time", "0:30:00"]

    def submit_by_hand(name: str, *more: str) -> Path:
        job = [str(TINY_JOB), f"data.path={corpus}", "output_dir=runs", f"name={name}", "steps=40"]
        answer = CliRunner().invoke(main, ["submit", *job, *site, *more])
        assert answer.exit_code == 0, answer.output
        return slurm.root / "runs" / name

    def events(run: Path) -> list[str]:
        file = run / "slurm.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line)["event"] for line in lines]

    def logged(run: Path) -> list[int]:
        rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        return [row["step"] for row in rows if "teacher/loss" in row]

    chain = submit_by_hand("chain", "--chain", "2")
    until(lambda: (chain / "metrics.jsonl").exists() and len(logged(chain)) > 5, "steps", 600)
    first = (chain / "submissions/001/jobs").read_text().split()[0]
    slurm.run("scancel", "--batch", "--signal=USR1", first)
    until(lambda: events(chain)[-1:] == ["done"], "the end of the chain", 600)
    assert events(chain) == ["start", "left", "start", "done"]
    submit_by_hand("seeds", "--seeds", "3,4")
    runs = [slurm.root / f"runs/seeds-seed{seed}" for seed in (3, 4)]
    until(lambda: all(events(run)[-1:] == ["done"] for run in runs), "both seeds", 600)
    assert all(logged(run) == list(range(1, 41)) for run in [chain, *runs])
    assert runs[0].joinpath("config.yaml").read_text().count("seed: 3") == 1
    assert len({(run / "metrics.jsonl").read_text() for run in runs}) == 2
