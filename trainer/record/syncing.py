"""`tandem sync`: make a run's trackers agree with its metrics.jsonl."""

from __future__ import annotations

import logging

from trainer.checkpoint import live_owner, newest_intact, published
from trainer.errors import TrainingError
from trainer.record.recorder import models_table
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder
from trainer.run_folder.run_files import read_evaluation
from trainer.tracking import tracking

_log = logging.getLogger(__name__)

PATIENCE_SECONDS = 3600.0


def sync(folder: RunFolder) -> str:
    """Send W&B the metrics that it lacks, and other trackers all; returns a message for the user.

    With a key, W&B's server then has every logged step, once and in order. Without a key, there is
    a single, complete offline folder. Raises TrainingError while the run is live (it sends its own
    metrics), if its metrics are damaged, if a tracker cannot be reached, and if W&B is off and
    there is no other.
    """
    if owner := live_owner(folder.path):
        raise TrainingError(f"{folder.path}: is running ({owner}), and sends its metrics itself")
    if not any(folder.attempts.glob("*.json")) and not published(folder.checkpoints):
        raise TrainingError(f"{folder.path}: never trained (no attempts/), so there is no W&B run")
    metrics.read(folder.metrics)  # raises for a line that is not a row
    config = folder.load_config()
    completed = read_evaluation(folder.evaluation) is not None
    lines = [_sync_tracker(folder, name, completed) for name in config.log.trackers]
    run_id = _run_id(folder)
    following = tracking.start(
        folder.path,
        mode="auto",
        about=config.log.wandb_run,
        run_id=run_id,
        models=models_table(config),
        verify=True,
    )
    if following is None:
        if not lines:
            raise TrainingError("WANDB_MODE=disabled: Weights & Biases is off; unset it")
        return "\n".join(lines)
    if not following.finish(completed=completed, seconds=PATIENCE_SECONDS):
        raise TrainingError(f"Weights & Biases did not take it; see {folder.logs / 'wandb.log'}")
    offline = sorted(folder.path.glob(f"wandb/offline-run-*-{run_id}"))
    if offline:
        lines += [f"{offline[-1]} is complete; to upload it: wandb sync {offline[-1]}"]
    else:
        lines += [f"W&B's run {_run_id(folder)} has every step of {folder.metrics}"]
    return "\n".join(lines)


def _sync_tracker(folder: RunFolder, name: str, completed: bool) -> str:
    following = tracking.start_tracker(folder.path, name)
    if following is None or not following.finish(completed=completed, seconds=PATIENCE_SECONDS):
        raise TrainingError(f"{name} did not take it; see {folder.logs / f'{name}.log'}")
    return f"{name} has every step of {folder.metrics}"


def _run_id(folder: RunFolder) -> str:
    checkpoint = newest_intact(folder.checkpoints, _log.warning)
    if checkpoint is not None:
        first = str(checkpoint.trainer_state["wandb_id"])
    else:
        first = tracking.first_id(folder.path)
    return tracking.current_id(folder.path, first)
