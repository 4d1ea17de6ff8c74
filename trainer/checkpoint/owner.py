"""The process that owns an attempt, and whether it is still alive, on this machine or another.

On the owner's machine (kernel, process namespace) the process table answers at once; a process id
that was reused since is recognised. On other machines the heartbeat answers: the owner touches its
attempt's record every few seconds. Its age is measured by the file system's clock. If that is not
conclusive, the check waits for the next heartbeat.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from configs import ConfigError
from configs.processes import SILENT_SECONDS, is_alive, is_here, machine, started
from configs.strict_json import from_json, read_json


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

    def record(self) -> dict[str, Any]:
        """The owner as JSON."""
        return asdict(self)

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
