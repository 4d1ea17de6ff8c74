"""Who runs an attempt, and whether that process is still alive, on this machine or another.

On the machine (kernel, process namespace) where the owner runs, the process table answers at once,
and a number that was given to another process since is not mistaken for it. From elsewhere its
heartbeat answers: the owner touches its attempt's record every few seconds, and the age of that is
measured by the file system's own clock, or, where it is in doubt, by waiting for the next beat.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from configs.strict_json import parse_json

HEARTBEAT_SECONDS = 5.0
SILENT_SECONDS = 30.0  # without a beat: dead, or cut off


@dataclass(frozen=True)
class Owner:
    """The process that leads an attempt: its rank 0."""

    host: str
    process: int
    machine: str  # within which `process` has a meaning; empty where that cannot be known
    started: int  # the process, in clock ticks since the machine was
    time: float  # seconds since 1970, for people
    job: str = ""  # SLURM's id
    restart: int = 0  # how often the scheduler has started that job before
    ended: bool = False  # in good order

    @classmethod
    def here(cls, job: str = "", restart: int = 0) -> Owner:
        """This process."""
        process = os.getpid()
        return cls(
            socket.gethostname(), process, _machine(), _started(process), time.time(), job, restart
        )

    @classmethod
    def of(cls, record: Path) -> Owner | None:
        """Who wrote an attempt's record; None where that cannot be read: it died while writing."""
        for patience in (0.2, 0.2, 0.0):
            try:
                content = parse_json(record.read_text())
                known = {field.name for field in fields(cls)} & content.keys()
                return cls(**{name: content[name] for name in known})
            except (ValueError, TypeError, AttributeError, FileNotFoundError):
                time.sleep(patience)
        return None

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def lives(self, record: Path) -> bool:
        """Whether this process is alive, of which `record` is the heart; may take half a minute."""
        if self.ended or self.is_on_this_machine:
            return not self.ended and self.has_process
        return _beats(record)

    @property
    def is_on_this_machine(self) -> bool:
        """Whether the process table here is the one that it is in, or was."""
        return bool(self.machine) and self.machine == _machine()

    @property
    def has_process(self) -> bool:
        """Whether it is in the process table of this machine."""
        return self.started != 0 and _started(self.process) == self.started

    def succeeds(self, other: Owner) -> bool:
        """Whether this is `other`, or a later start of its job by the scheduler.

        That one cannot be waited for: cut off from the scheduler it may run on. It is fenced off.
        """
        if (self.machine, self.process, self.started) == (
            other.machine,
            other.process,
            other.started,
        ):
            return True
        return bool(self.job) and self.job == other.job and self.restart > other.restart

    def __str__(self) -> str:
        """For a person: where it runs and since when."""
        job = f"SLURM job {self.job}, " if self.job else ""
        since = datetime.fromtimestamp(self.time).strftime("%Y-%m-%d %H:%M:%S")
        return f"{job}process {self.process} on {self.host}, since {since}"


def send_heartbeat(record: Path) -> None:
    """Tell others that the owner of `record` lives."""
    os.utime(record)


def _beats(record: Path) -> bool:
    """Whether a heart beats, judged from any machine by the clock of the file system."""
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
    """Opened, since a network file system may answer a mere stat from its cache."""
    try:
        with open(record, "rb") as file:
            return os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None


def _file_system_time(folder: Path) -> float:
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def _machine() -> str:
    """This boot of this kernel and this process namespace; a container has its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(process: int) -> int:
    """When a process began, in clock ticks since boot; 0 when it has ended (proc(5): stat)."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if stat[0] in "ZX" else int(stat[19])
