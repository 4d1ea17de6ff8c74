"""The time from the start of a process to its first step, by part, as one line in the log."""

from __future__ import annotations

import itertools
import logging
import os
import time
from pathlib import Path

_log = logging.getLogger(__name__)
_jobs = itertools.count()  # that this process has started: its imports belong to the first


class Startup:
    """Times the parts of a start, up to the first step.

    It is created right after the imports. Where the ranks are forks of the launcher, the launcher
    creates it, and the time counts from the launcher's start, or from here where the launcher has
    started a job before, as for a suite.
    """

    def __init__(self) -> None:
        self._seconds = {"imports": 0.0 if next(_jobs) else _age_of_process()}
        self._last = time.monotonic()
        self._over = False

    def mark(self, part: str) -> None:
        """Note that the part of the start with this name has just ended."""
        now = time.monotonic()
        self._seconds[part] = now - self._last
        self._last = now

    def first_step_is_done(self) -> None:
        """Log the parts; later calls do nothing."""
        if not self._over:
            self._over = True
            self.mark("first step")
            _log.info("%s", self)

    def __str__(self) -> str:
        """`first step 12.3 s after the start: imports 6.0, …`."""
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self._seconds.items())
        total = sum(self._seconds.values())
        return f"first step {total:.2f} s after the start: {parts}"


def _age_of_process() -> float:
    """Seconds since this process began, by the kernel's count (proc(5): stat, field 22)."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began = int(stat[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began
