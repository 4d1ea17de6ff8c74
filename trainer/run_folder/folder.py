"""The paths of a run's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import configs
from configs.runs import is_run, revision_in
from trainer.config import JobConfig
from trainer.errors import TrainingError

# The files of every export, in the order in which they are written.
EXPORTED = ("config.json", "model.safetensors", "model.yaml")
AVERAGED = ".average"  # what follows a learner's name in the export of its averaged weights


@dataclass(frozen=True)
class RunFolder:
    """The layout of ``runs/NAME``."""

    path: Path

    @classmethod
    def of(cls, config: JobConfig) -> RunFolder:
        """The run folder of a job; it need not exist yet."""
        return cls(Path(config.output_dir) / config.name)

    @classmethod
    def existing(cls, run: str) -> RunFolder:
        """A run by its folder, or its name under ``runs/``. Raises TrainingError if not found."""
        for path in (Path(run), Path("runs") / run):
            if (path / "config.yaml").is_file():
                return cls(path)
        raise TrainingError(f"{run}: not a run: no config.yaml in {run} or runs/{run}")

    @classmethod
    def begun(cls, run: str) -> RunFolder:
        """A run like `existing`, or one that is still queued, or loading in its first start."""
        for path in (Path(run), Path("runs") / run):
            if is_run(path):
                return cls(path)
        raise TrainingError(f"{run}: not a run: no job has begun in {run} or runs/{run}")

    @property
    def config(self) -> Path:
        """The resolved job config."""
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        """One folder per checkpoint."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One line per logged step."""
        return self.path / "metrics.jsonl"

    @property
    def origin(self) -> Path:
        """The run and step that a forked run comes from."""
        return self.path / "origin.json"

    @property
    def requests(self) -> Path:
        """Requests of users to a live run."""
        return self.path / "requests"

    @property
    def attempts(self) -> Path:
        """One record per attempt."""
        return self.path / "attempts"

    @property
    def logs(self) -> Path:
        """One log per rank."""
        return self.path / "logs"

    def rank_log(self, rank: int) -> Path:
        """The complete log of a rank."""
        return self.logs / f"rank-{rank:03d}.log"

    @property
    def evaluation(self) -> Path:
        """The final results of every learner; only a finished run has it."""
        return self.path / "evaluation.json"

    @property
    def exports(self) -> Path:
        """One folder per learner, in Hugging Face format."""
        return self.path / "exports"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.path / "report.html"

    def export(self, learner: str, *, average: bool = False) -> Path:
        """The export folder of a learner, given by its full name (``students/NAME``).

        That of its averaged weights stands beside it: no learner's name has a dot.
        """
        suffix = AVERAGED if average else ""
        return self.exports / f"{learner.removeprefix('students/')}{suffix}"

    def missing_exports(self, results: Mapping[str, Any]) -> list[str]:
        """The learners of a run's final results with an incomplete export."""

        def is_complete(folder: Path) -> bool:
            return all((folder / file).is_file() for file in EXPORTED)

        return [
            name
            for name, facts in results["learners"].items()
            if not is_complete(self.export(name))
            or ("export_of_average" in facts and not is_complete(self.export(name, average=True)))
        ]

    def has_final_report(self) -> bool:
        """Whether the report was written after the final results."""
        try:
            return self.report.stat().st_mtime_ns >= self.evaluation.stat().st_mtime_ns
        except FileNotFoundError:
            return False

    @property
    def setbacks(self) -> Path:
        """The students that the newest evaluation gave reason to name."""
        return self.path / "setbacks.json"

    @property
    def slow_ranks(self) -> Path:
        """The stragglers; the file exists only while there are any."""
        return self.path / "slow_ranks.json"

    def revision(self) -> str:
        """The git revision that the run was last started from; empty if unknown."""
        return revision_in(self.config.read_text(encoding="utf-8", errors="replace"))

    def load_config(self) -> JobConfig:
        """Load the config that this run was started with."""
        return configs.load(str(self.config), JobConfig, "job")
