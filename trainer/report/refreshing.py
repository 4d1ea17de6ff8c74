"""Refreshes the report of a live run in a separate process, which training does not wait for."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

EVERY_SECONDS = 60.0
# The process ends with its rank, even if that is killed (prctl(2): PR_SET_PDEATHSIG).
_PROGRAM = """
import ctypes, os, pathlib, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[3]):
    sys.exit()
os.nice(19)
sys.path.insert(0, sys.argv[2])
from trainer.report import write_report
write_report(pathlib.Path(sys.argv[1]), live=True)
"""


class LiveReport:
    """The ``report.html`` of a run in progress."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder
        self._writer: subprocess.Popen[bytes] | None = None
        self._since = float("-inf")

    def refresh(self) -> None:
        """Rewrite it, unless that was done a moment ago or is still in progress."""
        now = time.monotonic()
        busy = self._writer is not None and self._writer.poll() is None
        if busy or now - self._since < EVERY_SECONDS:
            return
        self._since = now
        code = str(Path(__file__).parents[2])
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with contextlib.suppress(OSError):  # no memory or process for it: try again next time
            self._writer = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(self._folder), code, str(os.getpid())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # an error must not spoil the display
            )

    def close(self) -> None:
        """End the writer, so that it does not overwrite the final report.

        On a busy machine its low priority may keep it from finishing for minutes, and the run has
        to save and end before its time limit.
        """
        if self._writer is not None:
            self._writer.kill()
            self._writer.wait()
