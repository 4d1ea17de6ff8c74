"""Detecting stragglers: ranks that compute longer than the others, which wait for them.

Every rank's step takes the same wall time, since all ranks wait for the slowest; the time that a
rank is busy differs. A rank is slow when it is busy more than 1.5 times the median in several
logged steps in a row. The log names it once, with its host. ``slow_ranks.json``, which `tandem
status` shows, names it while it is slow.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from trainer.durable import atomic_write

RATIO = 1.5
IN_A_ROW = 3


class SlowRanks:
    """Tracks over the logged steps how long each rank is busy."""

    def __init__(self, hosts: Sequence[str], file: Path) -> None:
        """`hosts` has each rank's host name."""
        self._hosts, self._file = hosts, file
        self._slow_steps = [0] * len(hosts)  # in a row, up to now
        self._slow: set[int] = set()
        self._reported: set[int] = set()
        file.unlink(missing_ok=True)

    def update(self, step: int, busy: Sequence[float]) -> list[str]:
        """Add the seconds that each rank was busy; returns a line for each newly slow rank."""
        slow = slow_among(busy)
        self._slow_steps = [
            count + 1 if rank in slow else 0 for rank, count in enumerate(self._slow_steps)
        ]
        now = {rank for rank, count in enumerate(self._slow_steps) if count >= IN_A_ROW}
        lines = [self._line(rank, busy) for rank in sorted(now - self._reported)]
        self._reported |= now
        if now != self._slow:
            self._slow = now
            with contextlib.suppress(OSError):  # a full disk: the log has the lines
                self._write(step, busy)
        return lines

    def _line(self, rank: int, busy: Sequence[float]) -> str:
        times = busy[rank] / statistics.median_low(busy)
        return f"rank {rank} on {self._hosts[rank]} is slow: it computes {times:.1f} times as long"

    def _write(self, step: int, busy: Sequence[float]) -> None:
        """Write the ranks that are slow now; remove the file when there is none."""
        if not self._slow:
            self._file.unlink(missing_ok=True)
            return
        rows = [
            {"rank": rank, "host": self._hosts[rank], "step": step, "says": self._line(rank, busy)}
            for rank in sorted(self._slow)
        ]
        atomic_write(self._file, json.dumps(rows))


def slow_among(busy: Sequence[float]) -> set[int]:
    """The ranks that are busy more than `RATIO` times the (low) median."""
    usual = statistics.median_low(busy)
    return {rank for rank, seconds in enumerate(busy) if seconds > RATIO * usual > 0}
