"""A job of the stand-in on a real SLURM, and what its run folder shows."""

from __future__ import annotations

import json
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.slurm import plan_job, submit
from tests.slurm.real_slurm import RealSlurm, requeue_soon
from tests.waiting import until


class Submitted:
    """A job that is submitted on construction. `config` is the stand-in's, `cluster` the site's."""

    def __init__(
        self,
        slurm: RealSlurm,
        source: Path,
        name: str = "demo",
        seeds: tuple[int, ...] = (),
        length: int = 1,
        cluster: dict | None = None,
        **config: float,
    ) -> None:
        self.slurm = slurm
        self.run = slurm.root / "runs" / name
        values = {"steps": 30, "seconds": 0.02, "save_every": 1000, **config}
        text = json.dumps({"output_dir": str(slurm.root / "runs"), "name": name, **values})
        defaults = {"nodes": "2", "ranks_per_node": 2, "preflight": False, "min_free_gb": 0.01}
        chosen = ClusterConfig(**(defaults | (cluster or {})))
        job = plan_job(name, self.run, chosen, seeds, chained=length > 1)
        self.ids = submit(job, chosen, text, length, source)
        self.id = self.ids[0]

    @property
    def steps(self) -> list[int]:
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line)["step"] for line in lines]

    @property
    def events(self) -> list[tuple[str, str]]:
        file = self.run / "slurm.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(one["event"], one["reason"]) for one in map(json.loads, lines)]

    def ranks(self, restart: int = 0) -> list[dict]:
        files = sorted(self.run.glob(f"seen/{restart}-*"))
        texts = (file.read_text() for file in files)
        return [json.loads(text) for text in texts if text]  # one may just be being written

    def reach(self, step: int, timeout: float = 120) -> None:
        until(lambda: self.steps and self.steps[-1] >= step, f"step {step}", timeout)

    def release(self) -> None:
        """Let it continue from the step at which it is held."""
        (self.run / "go").touch()

    def end(self, state: str = "COMPLETED", timeout: float = 120) -> None:
        facts = self.slurm.wait_job(self.id, timeout=timeout)
        assert facts["JobState"] == state, self.log

    def requeue_soon(self, restarts: int) -> None:
        """Skip SLURM's delay before a requeued job starts again, and do not hold it."""
        requeue_soon(self.slurm, self.id, restarts)
        self.release()

    @property
    def log(self) -> str:
        return "".join(file.read_text() for file in self.run.glob("logs/slurm-*.log"))
