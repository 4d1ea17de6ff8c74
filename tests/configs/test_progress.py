"""Progress on standard error, and the words for durations and for the time that is left."""

from __future__ import annotations

import io
import sys
import time

import pytest

from configs import progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def timed(clock: Clock, seconds: int) -> None:
    """Work on a hundredth of the total each second."""
    made = progress.Work("encoding train.csv", "examples", 20_000, clock)
    for _ in range(seconds):
        clock.now += 1
        made.advance(200)
    made.end()


def test_a_log_gets_a_line_every_ten_seconds(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    with progress.shown():
        timed(clock, 25)
    assert log.getvalue().splitlines() == [
        "encoding train.csv: 2,000 of 20,000 examples · 10s · 1m 30s left",
        "encoding train.csv: 4,000 of 20,000 examples · 20s · 1m 20s left",
    ]


def test_a_terminal_has_one_line_that_goes(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress.shown():
        timed(clock, 4)
    text = terminal.getvalue()
    assert "\n" not in text
    assert text.split("\r")[1].startswith("encoding train.csv: 400 of 20,000 examples · 2s")
    assert text.endswith("\r\x1b[K")


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_short_work_is_silent(clock, monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", where := stream())
    with progress.shown():
        timed(clock, 1)
    assert not where.getvalue()


def test_a_call_from_python_is_silent(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    timed(clock, 25)
    assert not log.getvalue()


def test_a_library_that_says_nothing_is_timed(monkeypatch):
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.3)
    monkeypatch.setattr(progress, "REDRAW_SECONDS", 0.05)
    with progress.shown(), progress.work("exporting the teacher", ticks=True):
        time.sleep(1.0)
    lines = log.getvalue().splitlines()
    assert 2 <= len(lines) <= 4
    assert set(lines) <= {"exporting the teacher · 0s", "exporting the teacher · 1s"}


@pytest.mark.parametrize(("unit", "single"), [("batches", "batch"), ("rows", "row"), ("MB", "MB")])
def test_a_single_unit_is_named_in_the_singular(clock, monkeypatch, unit, single):
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    made = progress.Work("scoring", unit, 0, clock)
    with progress.shown():
        clock.now = 11.0
        made.advance()
    assert log.getvalue() == f"scoring: 1 {single} \u00b7 11s\n"


def test_a_closed_stream_ends_no_work(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", closed := io.StringIO())
    made = progress.Work("work", "items", 0, clock)
    closed.close()
    with progress.shown():
        clock.now = 11.0
        made.advance()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (0, "0s"), (59.6, "1m 0s"), (754, "12m 34s"), (11045, "3h 4m"), (183845, "2d 3h")],
)
def test_durations(seconds, text):
    assert progress.duration(seconds) == text


def test_time_left_is_that_of_the_steps_or_of_the_hours_whichever_is_less():
    assert progress.seconds_left(90, 100, pace=1.0, seconds=90.0, hours=None) == 10.0
    assert progress.seconds_left(90, 100, pace=1.0, seconds=90.0, hours=0.5) == 10.0
    assert progress.seconds_left(90, 100, pace=1.0, seconds=1795.0, hours=0.5) == 5.0
    assert progress.seconds_left(90, 100, pace=1.0, seconds=1900.0, hours=0.5) == 0.0
