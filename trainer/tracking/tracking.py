"""Weights & Biases, kept away from training: a process of its own follows ``metrics.jsonl``.

The trainer starts the follower (`trainer/tracking/wandb_follower.py`) on rank 0 and has nothing
more to do with it until the end: no call per step, no network, no W&B thread in the training
process. An unreachable server, a full disk in W&B's own folder or a crash of the client therefore
cannot slow or stop training. Because the follower reads the file from its first row, a resumed run
has no gap, and because it skips the steps W&B already has, no step twice. When the trainer is
killed, its end of the pipe closes, and the follower still sends what is in the file.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.seeds import derive

MODES = ("auto", "offline", "disabled")

_log = logging.getLogger(__name__)
_FOLLOWER = Path(__file__).with_name("wandb_follower.py")
# Run by path, so that it does not import torch and DeepSpeed with the rest of this package.
_PROGRAM = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"


class Tracking:
    """A running follower; see `start`."""

    def __init__(self, follower: subprocess.Popen[bytes]) -> None:
        self._follower = follower

    def finish(self, *, completed: bool, seconds: float = 30.0) -> bool:
        """Let the follower send the rest and end; True when it did so within `seconds`.

        `completed` is whether the run reached its last step (else it will be resumed). A follower
        that takes longer is ended: metrics.jsonl has everything that it did not send.
        """
        try:
            self._follower.communicate(b"completed\n" if completed else b"stopped\n", seconds)
        except subprocess.TimeoutExpired:
            self._follower.terminate()
            _log.warning("Weights & Biases did not answer in time; metrics.jsonl has every row")
            return False
        except OSError:  # it ended before, as its log says
            return False
        return self._follower.returncode == 0


def first_id(run_folder: Path) -> str:
    """The id of a run at W&B, from its first instant on: a hash of its first attempt's record."""
    first = min((run_folder / "attempts").glob("*.json"))
    return f"{derive(first.read_text(encoding='utf-8', errors='replace')) % 16**8:08x}"


def current_id(run_folder: Path, first: str) -> str:
    """The id that a run which began as `first` has now: `tandem sync` may have renewed it."""
    renewed = run_folder / "wandb" / "id"
    return renewed.read_text() if renewed.exists() else first


def start(
    run_folder: Path,
    *,
    mode: str,
    project: str,
    run_id: str,
    models: Sequence[Mapping[str, Any]] = (),
    verify: bool = False,
) -> Tracking | None:
    """Follow ``run_folder/metrics.jsonl`` as the W&B run `run_id`; on rank 0 only. Never raises.

    `mode` is ``auto`` (online with a key, else offline), ``offline`` (no socket to any host) or
    ``disabled`` (None is returned). The run is named after the folder, its config is
    ``config.yaml``, and its table of students ``evaluation.json``. W&B's files go to ``wandb/``,
    what the client says to ``logs/wandb.log``. The key stays where W&B keeps it, in the
    environment or in ~/.netrc. `models` becomes a table. With `verify` a server's copy that has
    other steps than the file is written anew.
    """
    assert mode in MODES, mode
    if mode == "disabled" or os.environ.get("WANDB_MODE") == "disabled":
        return None
    options = {
        "folder": str(run_folder.resolve()),
        "mode": mode,
        "project": project,
        "id": run_id,
        "models": list(models),
        "verify": verify,
    }
    try:
        (run_folder / "logs").mkdir(parents=True, exist_ok=True)
        with (run_folder / "logs" / "wandb.log").open("ab") as log:
            follower = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(_FOLLOWER), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the trainer
            )
    except OSError as error:
        _log.warning("Weights & Biases was not started: %s", error)
        return None
    return Tracking(follower)
