"""The first thing an incarnation of a run does, before it reads any text or builds any model."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import configs
from data_pipeline import contents
from trainer.checkpoint import Attempt, Owner, published
from trainer.checkpoint.folder import read_trainer_file
from trainer.config import JobConfig
from trainer.control.requests import forget
from trainer.control.run_folder import REVISION, RunFolder
from trainer.durable import replace
from trainer.lifecycle.continuity import accepted_changes


@dataclass(frozen=True)
class Beginning:
    """What rank 0 found out and every rank must know."""

    config: JobConfig
    attempt: Attempt
    changes: list[str]  # of the config since the run was last started, one line each


def begin(config: JobConfig, owner: Owner) -> Beginning:
    """Take the run folder over, and write the config into it. On rank 0 only.

    Raises CheckpointError where another job is at work in it, TrainingError where the run cannot go
    on with this config or with what its corpora hold now, DataError where one of them is missing.
    """
    folder = RunFolder.of(config)
    folder.path.mkdir(parents=True, exist_ok=True)
    attempt = Attempt.begin(folder.path, owner)
    changes = []
    if folder.config.exists() and published(folder.checkpoints):
        read, there = _corpora_so_far(folder), contents(config.data)
        changes = accepted_changes(folder.load_config(), config, read, there)
    if owner.restart == 0:  # a person has started it, whatever was asked of the run before
        forget(folder.requests)
    text = f"{REVISION}{_git_revision()}\n{configs.dump(config)}"
    replace(folder.config, text)
    return Beginning(config, attempt, changes)


def _corpora_so_far(folder: RunFolder) -> dict[str, str]:
    """What the run has read, as its newest checkpoint that says so has it; empty in old ones."""
    for step in reversed(published(folder.checkpoints)):
        state = read_trainer_file(folder.checkpoints, step).get("state", {})
        if "corpora" in state:
            return dict(state["corpora"])
    return {}


def _git_revision() -> str:
    """Of the code that runs: a checkout, or a snapshot with its REVISION; else "none"."""
    root = Path(__file__).parents[2]
    if (root / "REVISION").is_file():
        return (root / "REVISION").read_text(encoding="utf-8").strip()
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return done.stdout.strip()
