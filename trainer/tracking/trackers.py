"""Trackers, each fed from ``metrics.jsonl`` by a process of its own, apart from training.

The process runs `main`. It ends at the end of standard input: after the line "completed" or
"stopped", or without either when the trainer was killed.

Rank 0 starts the processes, and does not contact them again until the end; at evaluations it looks
whether they still run. The training process has no network and no thread for them. So an
unreachable server, a full disk in W&B's folder or a crash of a client cannot slow or stop it.

A follower reads the file from its first row, so a resumed run has no gap. That of W&B skips the
steps that W&B has already, so no step is logged twice. When the trainer is killed, its end of the
pipe closes, and the follower sends the rest of the file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import logging
import os
import runpy
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import configs
from configs.kinds import require_new
from configs.strict_json import parse_json
from configs.typed import nearest
from trainer.learner_names import derive

Row = dict[str, float]
POLL_SECONDS = 1.0
_TRACKERS: dict[str, type[Tracker]] = {}
_Class = TypeVar("_Class", bound="type[Tracker]")


class Tail:
    """Reads a growing ``metrics.jsonl``: each row once, when its line is complete.

    A file that was replaced, when a resumed run truncated it, is read again from the beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0

    def rows(self) -> Iterator[Row]:
        """The rows since the last call."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                row = parse_json(line)
                yield {key: float(v) if isinstance(v, str) else v for key, v in row.items()}


class LastWord:
    """The trainer's line at its end: "completed" or "stopped", or nothing if it was killed."""

    def __init__(self) -> None:
        """Wait for a line of standard input, or its end, in a thread."""
        self.ended = threading.Event()
        self.text = ""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        self.text = sys.stdin.readline().strip()
        self.ended.set()


class Tracker(ABC):
    """Takes a run's metrics: in each attempt all of them, from the first row of the run on.

    So a tracker either writes its copy anew or leaves out what it has.
    """

    package: ClassVar[str] = ""  # which it imports, if any
    extra: ClassVar[str] = ""  # the extra of Tandem that installs it

    @abstractmethod
    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Open the tracker's copy of the run in `folder`; `config` is the job's, as plain data."""

    @abstractmethod
    def log(self, row: Row) -> None:
        """Add a row: numbers by name, ``step`` among them. A step may have several rows."""

    def check(self) -> None:  # noqa: B027 - optional
        """Called about every second until the trainer ends."""

    def preempt(self) -> None:  # noqa: B027 - optional
        """Called before `close` if the attempt was stopped so that the run can be resumed."""

    @abstractmethod
    def close(self, completed: bool) -> None:
        """The attempt has ended; `completed`: at the last step of the run."""


def register_tracker(name: str) -> Callable[[_Class], _Class]:
    """A decorator: ``log.trackers`` may name this `Tracker`."""

    def register(tracker: _Class) -> _Class:
        require_new(tracker, Tracker, _TRACKERS, name)
        _TRACKERS[name] = tracker
        return tracker

    return register


def registered_trackers() -> Mapping[str, type[Tracker]]:
    """All trackers that are registered, by name."""
    return dict(sorted(_TRACKERS.items()))


def why_not(name: str) -> str:
    """Why no run can be tracked by the tracker of this name here; empty if it can."""
    if name not in _TRACKERS:
        return f"no tracker has the name {name}{nearest(name, [*registered_trackers()])}"
    tracker = _TRACKERS[name]
    if not tracker.package or importlib.util.find_spec(tracker.package):
        return ""
    remedy = f"'tandem-distill[{tracker.extra}]'" if tracker.extra else tracker.package
    return f"{name} needs {tracker.package}: pip install {remedy}"


def follow(tracker: Tracker, folder: Path) -> None:
    """Give a tracker the rows of the run in `folder` until its trainer ends."""
    last_word, tail, last_look = LastWord(), Tail(folder / "metrics.jsonl"), False
    while not last_look:
        last_look = last_word.ended.wait(POLL_SECONDS)
        for row in tail.rows():
            tracker.log(row)
        if not last_look:
            tracker.check()
    if last_word.text == "stopped":
        tracker.preempt()
    tracker.close(last_word.text == "completed")


def main(name: str, file: str, folder: str, attempt: str, options: Mapping[str, Any]) -> None:
    """Follow a run by the tracker that `file` registers as `name`; `options` are its own.

    Exits without opening the tracker where a newer attempt than `attempt` has begun: its follower
    has replaced the tracker's copy, or will.
    """
    os.nice(10)  # training comes first
    runpy.run_path(file)
    run = Path(folder)
    if (newest := _newest_attempt(run)) != attempt:
        sys.exit(f"attempt {newest} of this run has begun; its process sends the metrics")
    config = configs.plain((run / "config.yaml").read_text(encoding="utf-8"), "config")
    follow(_TRACKERS[name](run, config, **options), run)


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

    def __init__(self, follower: subprocess.Popen[bytes], log: Path) -> None:
        """`log`: the file of its output, named for the tracker."""
        self._follower, self._log, self._is_told = follower, log, False
        self._title = TITLES.get(log.stem, log.stem)

    def check(self) -> None:
        """Warn, once, where the follower has ended by itself, as one does that cannot start."""
        if not self._is_told and self._follower.poll():
            self._is_told = True
            _log.warning("%s ended early, see %s; %s", self._title, self._log, _REMEDY)

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
        try:
            self._follower.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._follower.terminate()
            _log.warning("%s did not answer in time; %s", self._title, _REMEDY)
            return False
        self.check()
        return self._follower.returncode == 0


def finish_all(followers: Sequence[Tracking], *, completed: bool, seconds: float = LIMIT_S) -> None:
    """Finish all at the same time (`Tracking.finish`), so that a stop waits `seconds` at most."""
    for follower in followers:
        follower._announce_end(completed)
    deadline = time.monotonic() + seconds
    for follower in followers:
        follower._wait(deadline)


def _newest_attempt(run_folder: Path) -> str:
    """The number of the run's newest attempt; empty before the first."""
    return max((path.stem for path in (run_folder / "attempts").glob("*.json")), default="")


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
        "file": file or inspect.getfile(_TRACKERS[name]),
        "folder": str(run_folder.resolve()),
        "attempt": _newest_attempt(run_folder),
        "options": options or {},
    }
    log = run_folder / "logs" / f"{name}.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            follower = subprocess.Popen(
                [sys.executable, "-c", _FOLLOWER, _ROOT, json.dumps(told)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the trainer
            )
    except OSError as error:
        _log.warning("%s was not started: %s", TITLES.get(name, name), error)
        return None
    return Tracking(follower, log)
