"""Alerts about a run that make someone look: a stall, a spike rolled back, a crash loop."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from configs.runs import USUAL_ROWS, seconds_since, stall_timeout
from configs.strict_json import parse_json
from trainer.durable import atomic_write
from trainer.tracking.trackers import Row

CRASH_LOOP = 3  # attempts in a row without a new step


class Alerts:
    """Sends alerts, and writes each to ``alerts.jsonl``."""

    def __init__(
        self,
        send: Callable[[str, str], object],
        folder: Path,
        rollbacks: float = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`send` takes a title and a text.

        Args:
            rollbacks: how many have been reported already.
            clock: returns seconds.
        """
        self._send, self._folder = send, folder
        self._intervals: list[float] = []
        self._clock, self._last = clock, clock()
        self._is_stalled = False
        self._rollbacks = rollbacks

    def add_row(self, row: Row) -> None:
        """Take note of a row that has just been logged."""
        now = self._clock()
        self._intervals = [*self._intervals[-USUAL_ROWS + 1 :], now - self._last]
        self._last, self._is_stalled = now, False
        if row.get("rollbacks", 0.0) > self._rollbacks:
            self._rollbacks = row["rollbacks"]
            self._alert("spike", f"rolled back after a spike; resumed at step {row['step']:,.0f}")

    def check_stall(self) -> None:
        """Send an alert, once, when the run has made no progress for too long."""
        usual = statistics.fmean(self._intervals) if self._intervals else None
        quiet = min(self._clock() - self._last, seconds_since(self._folder / "metrics.jsonl"))
        if not self._is_stalled and quiet > stall_timeout(usual):
            self._is_stalled = True
            self._alert("stalled", f"no progress for {quiet / 60:.0f} minutes")

    def check_crash_loop(self, newest_step: float) -> None:
        """Count starts in a row without a new step; send an alert at `CRASH_LOOP` of them."""
        file = self._folder / "wandb" / "attempts.json"
        best, unproductive = _starts_so_far(file)
        unproductive = 0 if newest_step > best else unproductive + 1
        atomic_write(file, json.dumps([max(best, newest_step), unproductive]))
        if unproductive == CRASH_LOOP:
            text = f"{unproductive} attempts in a row made no step beyond {best:,.0f}"
            self._alert("crash loop", text)

    def _alert(self, title: str, text: str) -> None:
        with (self._folder / "alerts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "title": title, "text": text}) + "\n")
        self._send(title, f"{self._folder.name}: {text}")


def _starts_so_far(file: Path) -> tuple[float, int]:
    """The furthest step, and the starts in a row without a new one; a damaged file says nothing."""
    try:
        best, unproductive = parse_json(file.read_bytes())
        return float(best), int(unproductive)
    except (FileNotFoundError, ValueError, TypeError, OverflowError):
        return -1.0, 0
