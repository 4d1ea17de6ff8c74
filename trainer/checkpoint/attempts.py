"""Fencing: each incarnation of a run has a number, and an older one can change nothing any more.

A node that is cut off from the scheduler keeps running for a while beside the requeued copy of its
job. Every incarnation therefore takes the next number by *exclusive creation* of
``RUN/attempts/000002.json`` before it looks for a checkpoint, and writes there which checkpoints it
found. Whatever an older attempt publishes after that is in nobody's list, and readers ignore it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.errors import CheckpointError, StaleAttempt
from trainer.checkpoint.folder import all_steps, read_trainer_file, tidy
from trainer.checkpoint.storage import sync_folder

_FOLDER, _CHECKPOINTS = "attempts", "checkpoints"


@dataclass(frozen=True)
class Attempt:
    """One incarnation of a run. A small value: rank 0 begins it and sends it to the others."""

    run_folder: Path
    number: int

    @classmethod
    def begin(cls, run_folder: Path) -> Attempt:
        """Take the next number, fence the older attempts off and clear away what they left.

        On one process of the job only. ``run_folder`` must exist.

        Raises:
            CheckpointError: the run folder cannot be written.
        """
        try:
            number, descriptor = _claim(run_folder / _FOLDER)
            tidy(run_folder / _CHECKPOINTS, number)
            _record(descriptor, number, published(run_folder / _CHECKPOINTS))
            sync_folder(run_folder / _FOLDER)
        except OSError as error:
            raise CheckpointError(f"{error.filename}: {error.strerror}") from None
        return cls(run_folder, number)

    def check(self) -> None:
        """Return while this is the newest attempt.

        Raises:
            StaleAttempt: a newer attempt has begun, or the run folder is not this run's any more.
        """
        newest = max(_numbers(self.run_folder / _FOLDER), default=0)
        if newest == self.number:
            return
        began = f"attempt {newest} of this run has begun"
        reason = began if newest > self.number else "the run folder was removed"
        raise StaleAttempt(
            f"{self.run_folder}: {reason}; attempt {self.number} stops without touching it"
        )


def published(folder: Path) -> list[int]:
    """Steps of the checkpoints that count, oldest first.

    Left out is what an attempt published after a newer one had begun. ``folder`` is
    ``RUN/checkpoints``; without attempts beside it every checkpoint counts.
    """
    inherited = _inherited(folder.parent / _FOLDER)
    return [step for step in all_steps(folder) if not _came_too_late(folder, step, inherited)]


def _came_too_late(folder: Path, step: int, inherited: dict[int, set[int]]) -> bool:
    """Whether an attempt that did not find this checkpoint is newer than the one that wrote it."""
    not_found_by = [number for number, steps in inherited.items() if step not in steps]
    if not not_found_by:
        return False
    writer = read_trainer_file(folder, step).get("attempt")
    return writer is not None and writer < max(not_found_by)


def _claim(folder: Path) -> tuple[int, int]:
    """The first number that nobody has, and the new file that holds it."""
    folder.mkdir(exist_ok=True)
    number = max(_numbers(folder), default=0)
    while True:
        number += 1
        try:
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
            return number, os.open(folder / f"{number:06d}.json", flags, 0o644)
        except FileExistsError:
            continue


def _record(descriptor: int, number: int, checkpoints: list[int]) -> None:
    record = {
        "attempt": number,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "time": time.time(),
        "checkpoints": checkpoints,
    }
    with open(descriptor, "w") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(descriptor)


def _numbers(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob("*.json")]


def _inherited(folder: Path) -> dict[int, set[int]]:
    """For each attempt, the steps it found. One that died while beginning has no say."""
    records = {}
    for path in folder.glob("*.json"):
        try:
            records[int(path.stem)] = set(json.loads(path.read_text())["checkpoints"])
        except json.JSONDecodeError:
            continue
    return records
