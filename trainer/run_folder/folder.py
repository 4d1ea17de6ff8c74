"""Where everything of a run lives on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import configs
from trainer.config import JobConfig
from trainer.errors import TrainingError

# How the first line of config.yaml begins, a comment.
REVISION = "# git revision: "
# What every export has, the last one last.
EXPORTED = ("config.json", "model.safetensors", "model.yaml")


@dataclass(frozen=True)
class RunFolder:
    """The layout of ``runs/NAME``."""

    path: Path

    @classmethod
    def of(cls, config: JobConfig) -> RunFolder:
        """The folder of a job; it need not exist yet."""
        return cls(Path(config.output_dir) / config.name)

    @classmethod
    def existing(cls, run: str) -> RunFolder:
        """A run given by its folder, or by its name under ``runs/``. TrainingError if neither."""
        for path in (Path(run), Path("runs") / run):
            if (path / "config.yaml").is_file():
                return cls(path)
        raise TrainingError(f"{run}: no run there (no config.yaml in it, nor in runs/{run})")

    @classmethod
    def submitted(cls, run: str) -> RunFolder:
        """As `existing`, also for a run that waits in a queue to begin."""
        for path in (Path(run), Path("runs") / run):
            if (path / "submissions").is_dir():
                return cls(path)
        return cls.existing(run)

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
        """Where a run that was forked comes from."""
        return self.path / "origin.json"

    @property
    def requests(self) -> Path:
        """What people ask of the run while it is live."""
        return self.path / "requests"

    @property
    def attempts(self) -> Path:
        """One record per incarnation of the run."""
        return self.path / "attempts"

    @property
    def logs(self) -> Path:
        """One log per rank."""
        return self.path / "logs"

    def rank_log(self, rank: int) -> Path:
        """What a rank has to say in full."""
        return self.logs / f"rank-{rank:03d}.log"

    @property
    def evaluation(self) -> Path:
        """The final results of every learner; a finished run has it."""
        return self.path / "evaluation.json"

    @property
    def exports(self) -> Path:
        """One folder per learner, in Hugging Face format."""
        return self.path / "exports"

    @property
    def report(self) -> Path:
        """The page that shows the run."""
        return self.path / "report.html"

    def export(self, learner: str) -> Path:
        """Where the export of a learner, given by its full name, lies in the end."""
        return self.exports / learner.removeprefix("students/")

    def has_export(self, learner: str) -> bool:
        """Whether that is whole; the last of its files is written last."""
        return all((self.export(learner) / name).is_file() for name in EXPORTED)

    def has_final_report(self) -> bool:
        """Whether the report was written after the results, and not while the run went on."""
        try:
            return self.report.stat().st_mtime_ns >= self.evaluation.stat().st_mtime_ns
        except FileNotFoundError:
            return False

    @property
    def slow_ranks(self) -> Path:
        """The ranks that hold up the others; there is no such file when there are none."""
        return self.path / "slow_ranks.json"

    def revision(self) -> str:
        """The git revision that the run was last started from; empty if no line says it."""
        first = self.config.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        return first.removeprefix(REVISION) if first.startswith(REVISION) else ""

    def load_config(self) -> JobConfig:
        """The config this run was started with."""
        return configs.load(str(self.config), JobConfig, "job")
