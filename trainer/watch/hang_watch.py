"""A rank that makes no progress is ended, with the stack of each of its threads in its log.

The alarm is the kernel's (`setitimer`), and the handler, of `faulthandler`, is C: it needs neither
the interpreter's lock nor a thread that runs, so that it works wherever the rank is stuck. After
the stacks are written the signal takes its ordinary effect, which is to end the process (a code
other than 0 and 1, so that the scheduler starts the job again). All ranks move in step, so one that
hangs makes all of them late, and the stack of each is in its own log.
"""

from __future__ import annotations

import faulthandler
import signal
from io import TextIOWrapper
from pathlib import Path
from typing import Any


class HangWatch:
    """While it is open, at most `seconds` may pass between two calls of `heartbeat`."""

    def __init__(self, log: Path, seconds: float) -> None:
        """The stacks go to the end of `log`. One watch at a time; on the main thread."""
        self._path, self._seconds = log, seconds
        self._log: TextIOWrapper | None = None

    def heartbeat(self) -> None:
        """There was progress. A system call, about a microsecond."""
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
