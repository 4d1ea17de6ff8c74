"""The files, names and codes on which a run's processes and the commands about it agree.

A record of an attempt names its process and its machine, so that others can tell whether it is
still alive. A process id alone does not tell: it is used again, and every container counts from 1.
"""

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.strict_json import from_json, read_json

STOPPED = 75  # the exit code of a process that has saved and stopped on request
DISTRIBUTION = "tandem-distill"  # the package as it is installed
REVISION = "# git revision: "  # begins the first line of config.yaml
USUAL_ROWS = 10  # the usual interval is the mean over this many rows of metrics

_LEAST_TIMEOUT = 300.0
_FIRST_TIMEOUT = 1800.0

_BEGUN = ("config.yaml", "slurm.jsonl", "attempts/*.json")


def has_begun(run: Path) -> bool:
    """Whether a job has started in a folder; ``config.yaml`` is there once it has been accepted."""
    return any(True for name in _BEGUN for _ in run.glob(name))


def is_run(folder: Path) -> bool:
    """Whether a job has started in a folder, or was submitted there."""
    return has_begun(folder) or (folder / "submissions").exists()


def stall_timeout(usual: float | None) -> float:
    """Seconds without progress after which a run has stalled.

    usual: the usual seconds between its rows of metrics; None before the first one.
    """
    return _FIRST_TIMEOUT if usual is None else max(_LEAST_TIMEOUT, 10 * usual)


def seconds_since(file: Path) -> float:
    """Seconds since `file` was last written or touched; infinite where there is none.

    Of ``metrics.jsonl``, these are the seconds since a run's last progress: rank 0 touches it
    while steps are made, batches are scored and learners are exported.
    """
    try:
        return time.time() - file.stat().st_mtime
    except OSError:
        return math.inf


def revision_in(config: str) -> str:
    """The git revision that the text of a ``config.yaml`` was written by; empty if unknown."""
    first = config.partition("\n")[0]
    return first.removeprefix(REVISION) if first.startswith(REVISION) else ""


@dataclass(frozen=True)
class _Remark:
    says: str


def remarks_in(file: Path) -> list[str]:
    """The remarks in a file such as ``setbacks.json``, a line each; none if it is unreadable.

    Whoever shows a run shows these beside it, and must not fail for want of them.
    """
    try:
        return [" ".join(from_json(entry, _Remark, file).says.split()) for entry in read_json(file)]
    except (OSError, TypeError, ConfigError):
        return []


def has_ended(results: Mapping[str, Any], steps: int, hours: float | None) -> bool:
    """Whether a run of `steps` and perhaps `hours` has come to its end with these final results.

    results: the content of ``evaluation.json``, which may be damaged. Its ``seconds`` are the
    training time over all restarts; ``all_done``: every learner was done before the job's steps.
    """
    step, seconds = results.get("step"), results.get("seconds")
    if not isinstance(step, int):
        return False
    spent = seconds if isinstance(seconds, int | float) else 0.0
    all_done = results.get("all_done") is True
    return all_done or step >= steps or (hours is not None and spent >= hours * 3600)


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
        stat = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if stat[0] in b"ZX" else int(stat[19])


def is_here(named: str) -> bool:
    """Whether this is the `machine` that a record names; no machine is where it names none."""
    return bool(named) and named == machine()


def is_alive(process: int, start: int) -> bool:
    """Whether the process of this machine that `started` then is still in its process table."""
    return start != 0 and started(process) == start
