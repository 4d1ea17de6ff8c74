"""Trackers, each fed from ``metrics.jsonl`` by a process of its own.

`trainer.tracking.tracking` starts the process, which runs `main`. It ends at the end of standard
input: after the line "completed" or "stopped", or without either when the trainer was killed.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import runpy
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import configs
from configs.strict_json import parse_json
from configs.typed import nearest

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


def file_of(name: str) -> str:
    """The file that registers the tracker of this name."""
    return inspect.getfile(_TRACKERS[name])


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


def main(name: str, file: str, folder: str, options: Mapping[str, Any]) -> None:
    """Follow a run by the tracker that `file` registers as `name`; `options` are its own."""
    os.nice(10)  # training comes first
    runpy.run_path(file)
    run = Path(folder)
    config = configs.plain((run / "config.yaml").read_text(encoding="utf-8"), "config")
    follow(_TRACKERS[name](run, config, **options), run)
