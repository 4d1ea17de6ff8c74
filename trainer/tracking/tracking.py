"""Trackers, isolated from training: a separate process for each follows ``metrics.jsonl``.

Rank 0 starts the processes (`trainer.tracking.trackers`), and does not contact them again until the
end. The training process has no call per step, no network and no thread for them. So an unreachable
server, a full disk in W&B's folder or a crash of a client cannot slow or stop it.

A follower reads the file from its first row, so a resumed run has no gap. That of W&B skips the
steps that W&B has already, so no step is logged twice. When the trainer is killed, its end of the
pipe closes, and the follower sends the rest of the file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs.strict_json import parse_json
from trainer.learner_names import derive
from trainer.tracking import trackers

MODES = ("auto", "offline", "disabled")
LIMIT_S = 30.0  # for what trackers have still to send when a run ends
LATER = ("ended", "finished")  # what an attempt adds to its record when it is over

_log = logging.getLogger(__name__)
_ROOT = str(Path(__file__).parents[2])
_WANDB = str(Path(__file__).with_name("wandb_tracker.py"))
# Its imports are looked for in this checkout before the user's folder.
_FOLLOWER = """
import json, sys
sys.path.insert(0, sys.argv.pop(1))
from trainer.tracking.trackers import main
main(**json.loads(sys.argv[1]))
"""
TITLES = {"wandb": "Weights & Biases"}
_REMEDY = "metrics.jsonl has every row; `tandem sync` sends them"


class Tracking:
    """A running follower; see `start`."""

    def __init__(self, follower: subprocess.Popen[bytes], name: str) -> None:
        self._follower, self._name = follower, name

    def finish(self, *, completed: bool, seconds: float = LIMIT_S) -> bool:
        """Wait until the follower has sent the rest and ended; False if that takes too long.

        `completed`: whether the run reached its last step (else it will be resumed). After
        `seconds` the follower is ended; metrics.jsonl has everything that it did not send.
        """
        self._announce_end(completed)
        return self._wait(time.monotonic() + seconds)

    def _announce_end(self, completed: bool) -> None:
        assert self._follower.stdin is not None
        with contextlib.suppress(OSError), self._follower.stdin as pipe:  # it may have ended before
            pipe.write(b"completed\n" if completed else b"stopped\n")

    def _wait(self, deadline: float) -> bool:
        title = TITLES.get(self._name, self._name)
        try:
            self._follower.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._follower.terminate()
            _log.warning("%s did not answer in time; %s", title, _REMEDY)
            return False
        if self._follower.returncode:
            _log.warning("%s ended early, see logs/%s.log; %s", title, self._name, _REMEDY)
        return self._follower.returncode == 0


def finish_all(followers: Sequence[Tracking], *, completed: bool, seconds: float = LIMIT_S) -> None:
    """Finish all at the same time (`Tracking.finish`), so that a stop waits `seconds` at most."""
    for follower in followers:
        follower._announce_end(completed)
    deadline = time.monotonic() + seconds
    for follower in followers:
        follower._wait(deadline)


def first_id(run_folder: Path) -> str:
    """The run's first id at W&B: a hash of who made its first attempt, 8 hexadecimal digits."""
    first = min((run_folder / "attempts").glob("*.json"))
    text = first.read_text(encoding="utf-8", errors="replace")
    with contextlib.suppress(ValueError, AttributeError):  # it is torn
        record = parse_json(text).items()
        text = json.dumps({key: value for key, value in record if key not in LATER})
    return f"{derive(text) % 16**8:08x}"


def current_id(run_folder: Path, first: str) -> str:
    """The run's current id at W&B; `tandem sync` may have replaced `first`."""
    renewed = run_folder / "wandb" / "id"
    text = renewed.read_text(encoding="utf-8", errors="replace") if renewed.exists() else ""
    return text.strip(" \n\0") or first  # a crash may have left it empty


def start(
    run_folder: Path,
    *,
    mode: str,
    about: Mapping[str, Any],
    run_id: str,
    models: Sequence[Mapping[str, Any]] = (),
    verify: bool = False,
) -> Tracking | None:
    """Start a follower of ``run_folder/metrics.jsonl``, on rank 0 only. Never raises.

    The W&B run is named after the folder. Its config is ``config.yaml``, and its table of students
    is ``evaluation.json``. W&B's files go to ``wandb/``, and the client's output to
    ``logs/wandb.log``. The key is read where W&B keeps it, in the environment or in ~/.netrc.

    Args:
        mode: ``auto`` (online with a key, else offline), ``offline`` (no socket to any host) or
            ``disabled`` (returns None).
        about: arguments of ``wandb.init``, ``project`` at least; see `LogConfig.wandb_run`.
        run_id: see `first_id` and `current_id`.
        models: rows of a table, one per learner.
        verify: replace W&B's copy if its steps differ from the file's.
    """
    assert mode in MODES, mode
    if mode == "disabled" or os.environ.get("WANDB_MODE") == "disabled":
        return None
    options = {
        "mode": mode,
        "about": dict(about),
        "run_id": run_id,
        "models": list(models),
        "verify": verify,
    }
    return start_tracker(run_folder, "wandb", _WANDB, options)


def start_tracker(
    run_folder: Path, name: str, file: str = "", options: Mapping[str, Any] | None = None
) -> Tracking | None:
    """Start a follower that feeds the tracker which `file` registers as `name`. Never raises.

    Its output goes to ``logs/NAME.log``. Without a `file` the tracker is one of ``log.trackers``.
    """
    told = {
        "name": name,
        "file": file or trackers.file_of(name),
        "folder": str(run_folder.resolve()),
        "options": options or {},
    }
    try:
        (run_folder / "logs").mkdir(parents=True, exist_ok=True)
        with (run_folder / "logs" / f"{name}.log").open("ab") as log:
            follower = subprocess.Popen(
                [sys.executable, "-c", _FOLLOWER, _ROOT, json.dumps(told)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the trainer
            )
    except OSError as error:
        _log.warning("%s was not started: %s", TITLES.get(name, name), error)
        return None
    return Tracking(follower, name)
