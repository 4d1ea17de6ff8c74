"""The first actions of an attempt at a run, before it reads text or builds models."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import configs
from configs.runs import REVISION
from data_pipeline import Corpus, contents, open_corpora
from trainer.checkpoint import Attempt, Owner, newest_state, require_no_owner
from trainer.config import JobConfig
from trainer.control.requests import forget
from trainer.durable import atomic_write
from trainer.job_data.fit import require_inputs
from trainer.lifecycle.continuity import accepted_changes
from trainer.lifecycle.stored_teacher import require_same_order
from trainer.run_folder.folder import RunFolder
from trainer.stored_logits.manifest import Manifest


@dataclass(frozen=True)
class StartedRun:
    """What rank 0 determines at the start, for all ranks."""

    config: JobConfig
    attempt: Attempt


def start_run(config: JobConfig, owner: Owner) -> StartedRun:
    """Take over the run folder. On rank 0 only.

    Raises CheckpointError where another job is running in it.
    """
    folder = RunFolder.of(config)
    folder.path.mkdir(parents=True, exist_ok=True)
    attempt = Attempt.begin(folder.path, owner)
    with contextlib.suppress(FileNotFoundError):
        os.utime(folder.config)  # shows `tandem status` that the run is loading, not stalled
    if owner.restart == 0:  # started by a person, which cancels earlier requests
        forget(folder.requests)
    return StartedRun(config, attempt)


def require_startable(config: JobConfig, stores_first: bool = False) -> None:
    """Raise what would end the run as it starts, if it can be known on this machine.

    With `stores_first`, the predictions that it reads are written before it starts.

    Where corpora are behind URLs, which only the nodes may reach, nothing is compared with them.
    Raises DataError, TrainingError or CheckpointError. May take 30 s.
    """
    require_no_owner(RunFolder.of(config).path)
    corpora = open_corpora(config.data, urls=False)
    if len(corpora) == max(1, len(config.data.mixture) + len(config.data.tasks)):
        changes_since_checkpoint(config, corpora)
        if not stores_first:
            require_same_order(config, corpora)
    elif config.teacher.stored is not None and not stores_first:
        Manifest.load(Path(config.teacher.stored.path))
    require_inputs(config)


def changes_since_checkpoint(config: JobConfig, corpora: Mapping[str, Corpus]) -> list[str]:
    """The changes of the config since the run's newest checkpoint, one line each.

    `corpora` are those of `config`. Raises TrainingError where the run cannot resume with this
    config, or with what its corpora hold now.
    """
    folder = RunFolder.of(config)
    state = newest_state(folder.checkpoints)
    if state is None:
        return []
    before, read = config_of(folder, state, config), state.get("corpora", {})
    return accepted_changes(before, config, read, contents(config.data, corpora))


def accept(config: JobConfig) -> None:
    """Write ``config.yaml``, once all checks have passed. On rank 0 only."""
    text = f"{REVISION}{_git_revision()}\n{configs.dump(config)}"
    atomic_write(RunFolder.of(config).config, text)


def config_of(folder: RunFolder, state: Mapping[str, Any], now: JobConfig) -> JobConfig:
    """The config in a checkpoint's state, which is `now` itself where nothing has changed.

    ``config.yaml`` may have been edited or removed.
    """
    if "config" not in state:  # written by an old version
        return folder.load_config()
    if state["config"] == configs.dump(now):
        return now
    return configs.load_text(state["config"], JobConfig, "job", [], str(folder.checkpoints))


def _git_revision() -> str:
    """The git revision of the running code, a checkout or a snapshot with a REVISION; or "none"."""
    root = Path(__file__).parents[2]
    if (root / "REVISION").is_file():
        return (root / "REVISION").read_text(encoding="utf-8").strip()
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return done.stdout.strip()
