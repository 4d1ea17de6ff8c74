"""End a rank that makes no progress, with the stack of each of its threads in its log.

The timer is the kernel's (`setitimer`), and the handler is `faulthandler`'s, in C. It needs neither
the GIL nor a running thread, so it works wherever the rank is stuck. After it has written the
stacks, the signal ends the process, with an exit code other than 0 and 1: the scheduler starts the
job again. Ranks run in lockstep, so one hang stops them all, and each log has its rank's stacks.
"""

from __future__ import annotations

import faulthandler
import signal
from io import TextIOWrapper
from pathlib import Path
from typing import Any


class HangWatch:
    """While it is open, ends the process if `seconds` pass between two calls of `heartbeat`.

    It counts these calls: ``heartbeats``.
    """

    def __init__(self, log: Path, seconds: float) -> None:
        """`log` is the file to append the stacks to. One watch at a time, on the main thread."""
        self._path, self._seconds = log, seconds
        self._log: TextIOWrapper | None = None
        self.heartbeats = 0

    def heartbeat(self) -> None:
        """Report progress. One system call, about a microsecond."""
        self.heartbeats += 1
        if self._log is not None:
            signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __enter__(self) -> HangWatch:
        self._log = self._path.open("a")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, self._log, all_threads=True, chain=True)
        self.heartbeat()
        return self

    def __exit__(self, *exception: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.unregister(signal.SIGALRM)
        assert self._log is not None
        self._log.close()
