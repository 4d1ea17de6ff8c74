"""The progress of long work, on standard error, and how durations and counts are written.

tokenizer: learning 30,522 entries from 31,204,331 characters · 2m 10s

On a terminal it is one line that changes, and goes when the work is done. Elsewhere, as in a log,
there is a line every ten seconds. Short work shows nothing, nor does a call from Python.
"""

import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar


def seconds_left(step: int, steps: int, pace: float, seconds: float, hours: float | None) -> float:
    """The time left, in seconds, of a run with a limit of `steps` and perhaps `hours` of training.

    `pace` is in seconds per step; `seconds` is the training time so far. 0 when the run is done.
    """
    left = (steps - step) * pace
    if hours is not None:
        left = min(left, hours * 3600.0 - seconds)
    return max(0.0, left)


def duration(seconds: float) -> str:
    """A duration in its two largest units: 2d 3h, 5h 10m, 4m 20s, 42s; 0s if clocks disagree."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}h"
    if hours:
        return f"{hours}h {minute}m"
    return f"{minute}m {second}s" if minutes else f"{second}s"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number and what is counted: "1 text", "2,000 texts"; `plural` is for irregular nouns."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


FIRST_SECONDS, REDRAW_SECONDS = 2.0, 0.5  # on a terminal
LINE_SECONDS = 10.0  # elsewhere
LINE_START, REST_OF_LINE = "\r", "\x1b[K"

_T = TypeVar("_T")
_is_on = False


@contextmanager
def shown() -> Iterator[None]:
    """Show the progress of the work within: the command line does."""
    global _is_on
    before, _is_on = _is_on, True
    try:
        yield
    finally:
        _is_on = before


class Work:
    """Long work, and how much of it is done."""

    def __init__(
        self, what: str, unit: str, total: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`total` is how much of the `unit` there is to do; 0: unknown."""
        self._unit, self._total, self._clock = unit, total, clock
        self._is_terminal = sys.stderr.isatty()
        self._pause = REDRAW_SECONDS if self._is_terminal else LINE_SECONDS
        self._next = clock() + (FIRST_SECONDS if self._is_terminal else LINE_SECONDS)
        self._is_shown = False
        self._lock = threading.Lock()
        self.begin(what)

    def begin(self, what: str) -> None:
        """Begin another part of the work, of which nothing is done."""
        self._what, self._note, self._done, self._began = what, "", 0.0, self._clock()
        self.tick()

    def advance(self, amount: float = 1) -> None:
        """Note that this much more is done."""
        self._done += amount
        self.tick()

    def reach(self, done: float, total: float, note: str) -> None:
        """Note how much is done by now, of how much, and a fact about it."""
        self._done, self._total, self._note = done, total, note
        self.tick()

    def tick(self) -> None:
        """Show the state, if it is time to."""
        if not _is_on or self._clock() < self._next or not self._lock.acquire(blocking=False):
            return
        self._next, self._is_shown = self._clock() + self._pause, True
        if self._is_terminal:
            columns = shutil.get_terminal_size().columns - 1
            _write(f"{LINE_START}{self._line()[:columns]}{REST_OF_LINE}")
        else:
            _write(f"{self._line()}\n")
        self._lock.release()

    def end(self) -> None:
        """Take the line off a terminal."""
        if self._is_shown and self._is_terminal:
            _write(f"{LINE_START}{REST_OF_LINE}")

    def _line(self) -> str:
        elapsed = self._clock() - self._began
        facts = [self._note, duration(elapsed)]
        if self._total and 0 < self._done <= self._total:
            left = elapsed * (self._total - self._done) / self._done
            facts.append(f"{duration(left)} left")
        of_all = f" of {_number(self._total)}" if self._total else ""
        is_alone = self._done == 1 and not self._total
        unit = re.sub("(?<=ch)es$|s$", "", self._unit) if is_alone else self._unit
        amount = f": {_number(self._done)}{of_all} {unit}" if self._done else ""
        return " · ".join([f"{self._what}{amount}", *filter(None, facts)])


@contextmanager
def work(what: str, unit: str = "", total: float = 0, ticks: bool = False) -> Iterator[Work]:
    """Show the progress of the work within, which says how much of it is done.

    ticks: a thread shows the time meanwhile, for a library that is silent; start no fork within.
    """
    made, done = Work(what, unit, total), threading.Event()

    def tick() -> None:
        while not done.wait(REDRAW_SECONDS):
            made.tick()

    thread = threading.Thread(target=tick, daemon=True) if ticks and _is_on else None
    if thread:
        thread.start()
    try:
        yield made
    finally:
        done.set()
        if thread:
            thread.join()
        made.end()


def tracked(items: Iterable[_T], what: str, unit: str, total: float = 0) -> Iterator[_T]:
    """These items, with the progress of whoever takes them."""
    with work(what, unit, total) as made:
        for item in items:
            yield item
            made.advance()


def _write(text: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads it
        sys.stderr.write(text)
        sys.stderr.flush()


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"
