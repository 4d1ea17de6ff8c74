"""The real training job on a real SLURM: two nodes over gloo, disturbed in different ways.

Whatever happens to it, the losses are those of a run that nobody disturbed, to the last bit.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import configs
from cluster.config import ClusterConfig
from cluster.slurm import plan_job, submit
from tandem import main
from tests.conftest import TINY_JOB, tandem
from tests.slurm.real_slurm import RealSlurm, until

pytestmark = pytest.mark.slow
SITE = ClusterConfig(
    nodes="2", min_free_gb=0.1, preflight=False, variables={"OMP_NUM_THREADS": "1"}
)


class Training:
    """A run of the tiny job: a teacher and two students, one rank on each of two nodes."""

    def __init__(
        self, slurm: RealSlurm, corpus: Path, name: str, site: ClusterConfig = SITE, steps: int = 40
    ) -> None:
        from trainer.config import JobConfig

        self.slurm = slurm
        self.run = slurm.root / "runs" / name
        overrides = [f"name={name}", f"data.path={corpus}", f"steps={steps}", "checkpoint.every=5"]
        config = configs.load(str(TINY_JOB), JobConfig, "job", overrides)
        self.id = submit(plan_job(name, self.run, site), site, configs.dump(config))[0]

    @property
    def losses(self) -> dict[int, dict[str, float]]:
        """Per step, every learner's losses, training and held-out."""
        found: dict[int, dict[str, float]] = {}
        for row in map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines()):
            named = {key: value for key, value in row.items() if key.endswith("/loss")}
            assert not named.keys() & found.get(row["step"], {}).keys(), "a step is logged twice"
            found.setdefault(row["step"], {}).update(named)
        return found

    def reach(self, step: int) -> None:
        file = self.run / "metrics.jsonl"

        def reached() -> bool:
            assert self.slurm.job(self.id)["JobState"] in ("PENDING", "RUNNING"), self.log
            return file.exists() and f'"step": {step},' in file.read_text()

        until(reached, f"step {step}", 240)

    def end(self) -> None:
        facts = self.slurm.wait_job(self.id, timeout=400)
        assert facts["JobState"] == "COMPLETED", self.log

    @property
    def log(self) -> str:
        return "".join(file.read_text() for file in self.run.glob("logs/slurm-*.log"))


def warn(training: Training) -> None:
    training.slurm.run("scancel", "--batch", "--signal=USR1", training.id)


def test_a_stop_is_final(slurm: RealSlurm, corpus: Path) -> None:
    """`tandem stop` from outside of the job: saved, ended, not requeued. Before, no second job."""
    site = dataclasses.replace(SITE, nodes="1")
    training = Training(slurm, corpus, "stopped", site, steps=100_000)
    training.reach(13)
    second = tandem("train", training.run / "config.yaml", f"runs={training.run.parent}")
    assert second.returncode == 1
    assert f"this run is at work already (SLURM job {training.id}, process " in second.stderr
    answer = CliRunner().invoke(main, ["stop", str(training.run)])
    assert answer.exit_code == 0, answer.output
    slurm.wait_job(training.id, timeout=100)
    assert slurm.job(training.id)["Restarts"] == "0"
    last = json.loads((training.run / "slurm.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["reason"]) == ("final", "stopped on request")


def power_off(training: Training) -> None:
    training.slurm.power_off("n2")
    training.slurm.run("scontrol", "update", "nodename=n2", "state=down", "reason=powered-off")


def test_losses_are_those_of_an_undisturbed_run(slurm: RealSlurm, corpus: Path) -> None:
    calm = Training(slurm, corpus, "calm")
    calm.end()
    assert sorted(calm.losses) == list(range(1, 41))
    disturbances: list[Callable[[Training], None]] = [warn, power_off]
    for disturb in disturbances:
        training = Training(slurm, corpus, disturb.__name__)
        training.reach(13)
        disturb(training)
        training.end()
        assert slurm.job(training.id)["Restarts"] == "1"
        assert training.losses == calm.losses


def test_a_stale_job_cannot_damage_its_requeued_copy(slurm: RealSlurm, corpus: Path) -> None:
    """n1 is cut off from everything but the disk, and trains on while SLURM starts the job anew."""
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
