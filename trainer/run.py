"""One rank's life: from a config to a finished run, or to a requested stop."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import configs
from trainer.checkpoint import published
from trainer.conclusion import conclude
from trainer.config import JobConfig
from trainer.continuity import refuse_other_data
from trainer.engine import join_process_group
from trainer.job import Job
from trainer.loop import Outcome, train
from trainer.run_folder import REVISION, RunFolder

_log = logging.getLogger(__name__)
Announce = Callable[[RunFolder, dict[str, Any]], None]


def run_job(config: JobConfig, stop_requested: Callable[[], bool], announce: Announce) -> Outcome:
    """Train `config` to its end as one of the ranks the environment describes.

    A run that was interrupted goes on from its newest intact checkpoint. Rank 0 then scores and
    exports everyone and hands the results to `announce`.
    """
    device = join_process_group()
    rank = dist.get_rank()
    folder = RunFolder.of(config)
    if rank == 0:
        _prepare(folder, config)
    dist.barrier()
    _log_to_file(folder, rank)
    try:
        with Job(config, device, stop_requested) as job:
            outcome = train(job)
    except Exception as error:
        # The whole of it for the rank's log only; the command line says one line of it.
        _log.info("ended by an error: %s", error, exc_info=True)
        raise
    if outcome is Outcome.FINISHED and rank == 0:
        announce(folder, conclude(folder))
    job.recorder.finish(completed=outcome is Outcome.FINISHED)
    dist.barrier()  # launchers take a rank that ends early for one that died
    dist.destroy_process_group()
    return outcome


def _prepare(folder: RunFolder, config: JobConfig) -> None:
    if folder.config.exists() and published(folder.checkpoints):
        refuse_other_data(folder.load_config(), config)
    folder.path.mkdir(parents=True, exist_ok=True)
    text = f"{REVISION}{_git_revision()}\n{configs.dump(config)}"
    beside = folder.config.with_name("config.yaml.new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, folder.config)


def _git_revision() -> str:
    """Of the code that runs: a checkout, or a snapshot with its REVISION; else "none"."""
    root = Path(__file__).parents[1]
    if (root / "REVISION").is_file():
        return (root / "REVISION").read_text(encoding="utf-8").strip()
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return done.stdout.strip()


def _log_to_file(folder: RunFolder, rank: int) -> None:
    """Everything to the rank's own log; warnings of rank 0 to the terminal as well."""
    logging.raiseExceptions = False  # a full disk is the checkpoints' and the metrics' to report
    folder.logs.mkdir(exist_ok=True)
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    handlers: list[logging.Handler] = [logging.FileHandler(folder.logs / f"rank-{rank:03d}.log")]
    if rank == 0:
        terminal = logging.StreamHandler(sys.stderr)
        terminal.setLevel(logging.WARNING)
        handlers.append(terminal)
    logging.basicConfig(level=logging.INFO, format=form, handlers=handlers, force=True)
