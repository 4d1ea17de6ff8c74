"""Fencing: each attempt at a run has a number, and an older attempt can no longer change the run.

A node that is cut off from the scheduler keeps running for a while beside the requeued copy of its
job. So every attempt first takes the next number, by *exclusive creation* of
``RUN/attempts/000002.json``. It lists there the checkpoints that it finds. A checkpoint that an
older attempt publishes afterwards is in no newer list, and readers ignore it.

The same record names the owner of the run (see `Owner`). While the owner is alive, a second job of
the same run is refused. On the owner's machine (kernel, process namespace) the process table
answers at once whether it is alive; a process id that was reused since is recognised. On other
machines the heartbeat answers: the owner touches its attempt's record every few seconds. Its age is
measured by the file system's clock. If that is not conclusive, the check waits for the next
heartbeat.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from configs import ConfigError
from configs.durable import atomic_write
from configs.runs import SILENT_SECONDS, is_alive, is_here, machine, started
from configs.strict_json import from_json, parse_json, read_json
from trainer.checkpoint.folder import all_steps, tidy, writer_of
from trainer.errors import CheckpointError, StaleAttempt

_FOLDER, _CHECKPOINTS = "attempts", "checkpoints"


@dataclass(frozen=True)
class Owner:
    """The process that leads an attempt: its rank 0."""

    host: str
    process: int
    machine: str  # the boot and process namespace of `process`; empty if unknown
    started: int  # when the process started, in clock ticks since boot
    time: float  # Unix time of the attempt's start, for messages
    job: str = ""  # SLURM's job id
    restart: int = 0  # how often the scheduler has restarted that job
    ended: bool = False  # normally

    @classmethod
    def here(cls, job: str = "", restart: int = 0) -> Owner:
        """This process."""
        process = os.getpid()
        return cls(
            socket.gethostname(), process, machine(), started(process), time.time(), job, restart
        )

    @classmethod
    def of(cls, record: Path) -> Owner | None:
        """The owner in an attempt's record; None if its writer died before it was complete."""
        for retry_seconds in (0.2, 0.2, 0.0):
            try:
                return from_json(read_json(record), cls, record)
            except (ConfigError, FileNotFoundError):
                time.sleep(retry_seconds)
        return None

    def is_alive(self, record: Path) -> bool:
        """Whether this process is alive; `record` has its heartbeat. May take 30 s."""
        if self.ended or self.is_on_this_machine:
            return not self.ended and self.has_process
        return _has_heartbeat(record)

    @property
    def is_on_this_machine(self) -> bool:
        """Whether the process runs, or ran, on this machine."""
        return is_here(self.machine)

    @property
    def has_process(self) -> bool:
        """Whether the process is in the process table of this machine."""
        return is_alive(self.process, self.started)

    def succeeds(self, other: Owner) -> bool:
        """Whether this is `other`, or a later start of the same job by the scheduler.

        A later start must not wait for `other`, which may keep running when it is cut off from the
        scheduler. It fences `other` off instead.
        """
        if (self.machine, self.process, self.started) == (
            other.machine,
            other.process,
            other.started,
        ):
            return True
        return bool(self.job) and self.job == other.job and self.restart > other.restart

    def __str__(self) -> str:
        """Where the process runs, and since when, for messages."""
        job = f"SLURM job {self.job}, " if self.job else ""
        since = datetime.fromtimestamp(self.time).strftime("%Y-%m-%d %H:%M:%S")
        return f"{job}process {self.process} on {self.host}, since {since}"


def send_heartbeat(record: Path) -> None:
    """Show that the owner of `record` is alive."""
    os.utime(record)


def _has_heartbeat(record: Path) -> bool:
    """Whether the owner sends heartbeats, judged on any machine by the file system's clock."""
    last = _modified(record)
    if last is None or _file_system_time(record.parent) - last > SILENT_SECONDS:
        return False
    end = time.monotonic() + SILENT_SECONDS
    while time.monotonic() < end:
        time.sleep(0.5)
        if _modified(record) != last:
            return True
    return False


def _modified(record: Path) -> float | None:
    """Read from an open file, since a network file system may answer a stat from its cache."""
    try:
        with open(record, "rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None


def _file_system_time(folder: Path) -> float:
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


@dataclass(frozen=True)
class Attempt:
    """One attempt at a run. A small value: rank 0 begins it and broadcasts it."""

    run_folder: Path
    number: int

    @classmethod
    def begin(cls, run_folder: Path, owner: Owner | None = None) -> Attempt:
        """Take the next number, fence off older attempts, and remove their unfinished files.

        Call in one process of the job, the `owner` (by default this one). ``run_folder`` must
        exist.

        Raises:
            CheckpointError: another job is running in the run folder.
            OSError: the run folder cannot be written.
        """
        owner = owner or Owner.here()
        try:
            attempt = cls(run_folder, _claim(run_folder, owner))
            tidy(run_folder / _CHECKPOINTS, attempt.number)
            checkpoints = published(run_folder / _CHECKPOINTS)
            content = {"attempt": attempt.number, **asdict(owner), "checkpoints": checkpoints}
            _write(attempt.record, content)
        except OSError as error:
            error.filename = error.filename or str(run_folder)
            raise
        return attempt

    def finish(self) -> None:
        """Record that the run is finished; the scheduler's exit codes do not prove it."""
        _write(self.record, {**_content(self.record), "finished": True})

    def end(self) -> None:
        """Record that this attempt ended normally, so that no heartbeat is waited for."""
        _write(self.record, {**_content(self.record), "ended": True})

    def disown_after(self, step: int) -> None:
        """Disown the earlier attempts' checkpoints after `step`, when a run rolls back.

        They stay on disk until new ones replace them. Checkpoints of this attempt are not affected.
        """
        content = _content(self.record)
        steps = _found(content) or all_steps(self.run_folder / _CHECKPOINTS)
        kept = [earlier for earlier in steps if earlier <= step]
        _write(self.record, {**content, "checkpoints": kept})

    @property
    def record(self) -> Path:
        """This attempt's record; its modification time is the heartbeat."""
        return self.run_folder / _FOLDER / f"{self.number:06d}.json"

    def check(self) -> None:
        """Do nothing while this is the newest attempt.

        Raises:
            StaleAttempt: a newer attempt has begun, or the run folder was removed.
        """
        newest = max(_numbers(self.run_folder / _FOLDER), default=0)
        if newest == self.number:
            return
        began = f"attempt {newest} of this run has begun"
        reason = began if newest > self.number else "the run folder was removed"
        raise StaleAttempt(
            f"{self.run_folder}: {reason}; attempt {self.number} stops without touching it"
        )


def live_owner(run_folder: Path) -> Owner | None:
    """The live owner of a run; None if there is none. May take 30 s to find out."""
    _, record, owner = _newest(run_folder)
    return owner if owner and owner.is_alive(record) else None


def require_no_owner(run_folder: Path) -> None:
    """Raise CheckpointError where another job is running in the folder. May take 30 s."""
    if owner := live_owner(run_folder):
        raise _already_running(run_folder, owner)


def owner_has_ended(run_folder: Path) -> bool:
    """Whether the newest attempt's owner has ended normally, by its own record; answers at once."""
    _, _, owner = _newest(run_folder)
    return bool(owner and owner.ended)


def published(folder: Path) -> list[int]:
    """Steps of the valid checkpoints, oldest first.

    A checkpoint that an attempt published after a newer one had begun is left out. ``folder`` is
    ``RUN/checkpoints``; without attempts beside it, every checkpoint is valid.
    """
    inherited = _inherited(folder.parent / _FOLDER)
    return [step for step in all_steps(folder) if not _is_stale(folder, step, inherited)]


def _is_stale(folder: Path, step: int, inherited: dict[int, set[int]]) -> bool:
    """Whether an attempt newer than this checkpoint's writer did not find it when it began."""
    not_found_by = [number for number, steps in inherited.items() if step not in steps]
    if not not_found_by:
        return False
    writer = writer_of(folder, step)
    return writer is not None and writer < max(not_found_by)


def _already_running(run_folder: Path, owner: Owner) -> CheckpointError:
    return CheckpointError(
        f"{run_folder}: this run is already running ({owner}); wait for it, end it with "
        f"`tandem stop {shlex.quote(str(run_folder))}`, or give this job another name"
    )


def _claim(run_folder: Path, owner: Owner) -> int:
    """Take the number after the newest attempt's, unless that attempt's owner is alive.

    If several attempts begin at once, one gets the number; the others then find it alive.
    """
    folder = run_folder / _FOLDER
    folder.mkdir(exist_ok=True)
    while True:
        newest, before, holder = _newest(run_folder)
        if holder and not owner.succeeds(holder) and holder.is_alive(before):
            raise _already_running(run_folder, holder)
        try:
            with open(Attempt(run_folder, newest + 1).record, "x") as file:
                json.dump(asdict(owner), file)
        except FileExistsError:
            continue
        return newest + 1


def _newest(run_folder: Path) -> tuple[int, Path, Owner | None]:
    """The newest attempt's number, its record and its owner; 0 and None before the first one."""
    number = max(_numbers(run_folder / _FOLDER), default=0)
    record = Attempt(run_folder, number).record
    return number, record, Owner.of(record) if number else None


def _write(record: Path, content: dict[str, Any]) -> None:
    atomic_write(record, json.dumps(content))


def _content(record: Path) -> dict[str, Any]:
    """A record's content; empty if it is torn or damaged."""
    try:
        content = parse_json(record.read_bytes())
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _numbers(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob("*.json") if path.stem.isdecimal()]


def _found(content: Mapping[str, Any]) -> list[int] | None:
    """The checkpoints that an attempt found; None if its record does not say."""
    steps = content.get("checkpoints")
    is_said = isinstance(steps, list) and all(isinstance(step, int) for step in steps)
    return steps if is_said else None


def _inherited(folder: Path) -> dict[int, set[int]]:
    """The steps that each attempt found. One that died while beginning is left out."""
    listed = {
        number: _found(_content(folder / f"{number:06d}.json")) for number in _numbers(folder)
    }
    return {number: set(steps) for number, steps in listed.items() if steps is not None}
