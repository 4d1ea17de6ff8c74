"""Naming a rank that holds up all others, from how long each one computes.

Every rank's step takes the same time, since all wait for the slowest; what differs is how much of
it a rank is busy. A rank that is busy half as long again as the median, in several logged steps in
a row, is named with its host: once in the log, however often it recovers meanwhile, and for `tandem
status` in ``slow_ranks.json``, while it is slow.
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
    """Follows how busy the ranks are over the logged steps."""

    def __init__(self, hosts: Sequence[str], file: Path) -> None:
        """`hosts` has the name of each rank's machine."""
        self._hosts, self._file = hosts, file
        self._seen = [0] * len(hosts)
        self._named: set[int] = set()
        self._said: set[int] = set()
        file.unlink(missing_ok=True)

    def look(self, step: int, busy: Sequence[float]) -> list[str]:
        """Take in the seconds that each rank was busy; a line for each that is newly named."""
        slow = slow_among(busy)
        self._seen = [count + 1 if rank in slow else 0 for rank, count in enumerate(self._seen)]
        now = {rank for rank, count in enumerate(self._seen) if count >= IN_A_ROW}
        lines = [self._line(rank, busy) for rank in sorted(now - self._said)]
        self._said |= now
        if now != self._named:
            self._named = now
            with contextlib.suppress(OSError):  # a full disk: the log has the lines
                self._write(step, busy)
        return lines

    def _line(self, rank: int, busy: Sequence[float]) -> str:
        times = busy[rank] / statistics.median_low(busy)
        return f"rank {rank} on {self._hosts[rank]} is slow: it computes {times:.1f} times as long"

    def _write(self, step: int, busy: Sequence[float]) -> None:
        """Who is slow now; no file when nobody is."""
        if not self._named:
            self._file.unlink(missing_ok=True)
            return
        rows = [
            {"rank": rank, "host": self._hosts[rank], "step": step, "says": self._line(rank, busy)}
            for rank in sorted(self._named)
        ]
        atomic_write(self._file, json.dumps(rows))


def slow_among(busy: Sequence[float]) -> set[int]:
    """The ranks that compute far longer than the median; of two ranks, than the other."""
    usual = statistics.median_low(busy)
    return {rank for rank, seconds in enumerate(busy) if seconds > RATIO * usual > 0}
