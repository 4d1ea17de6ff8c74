"""Which process of which machine runs a job, so that others can tell whether it is still alive.

A process id alone does not tell: it is used again, and every container counts from 1.
"""

from __future__ import annotations

import os
from pathlib import Path

HEARTBEAT_SECONDS = 5.0  # after which rank 0 touches its attempt's record again
SILENT_SECONDS = 30.0  # without a heartbeat, after which rank 0 is dead or cut off


def machine() -> str:
    """The id of this boot and this process namespace, which a container has its own of.

    Empty where the system does not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def started(process: int) -> int:
    """When a process started, in clock ticks since boot; 0 if it has ended (proc(5): stat).

    The times of ``/proc/PID`` itself do not tell: Linux sets them whenever it makes that folder
    anew, which it forgets when memory is short.
    """
    try:
        stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if stat[0] in "ZX" else int(stat[19])


def is_here(named: str) -> bool:
    """Whether this is the `machine` that a record names; no machine is where it names none."""
    return bool(named) and named == machine()


def is_alive(process: int, start: int) -> bool:
    """Whether the process of this machine that `started` then is still in its process table."""
    return start != 0 and started(process) == start
