import io
import os
import pty
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from tests.waiting import read
from trainer.record.display import Display
from trainer.scoring.columns import NUMBER, Column


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def console(terminal, width=100):
    return Console(file=io.StringIO(), force_terminal=terminal, width=width)


def row(loss, speed=1000.0, **more):
    return {"teacher/loss": loss, "teacher/lr": 0.1, "tokens_per_second": speed, **more}


def test_off_a_terminal_there_is_a_line_every_ten_seconds_and_a_last_one(clock):
    out = console(terminal=False)
    with Display("demo", 100, console=out, clock=clock) as display:
        for step in range(1, 101):
            clock.now += 1
            display.update(step, row(5 - step / 100), waiting=["students/half"])
    lines = out.file.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0] == (
        "demo: step 1/100 · 1,000 tokens/s · 1m 39s left · teacher: loss 4.990; half: waiting"
    )
    assert lines[-1] == "demo: step 100/100 · 1,000 tokens/s · teacher: loss 4.000; half: waiting"
    assert "\x1b" not in out.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_steps_of_minutes_are_shown_before_one_is_logged(clock, terminal):
    out = console(terminal)
    with Display("demo", 100, console=out, clock=clock) as display:
        for step in range(1, 5):
            clock.now += 240
            display.advance(step, 240.0 * step)
        clock.now += 59
        display.advance(5, 1019.0)
    assert "4/100 · 6h 24m left" in out.file.getvalue()
    assert "5/100" not in out.file.getvalue()
    assert terminal or len(out.file.getvalue().splitlines()) == 4


def test_time_left_is_that_of_the_steps_or_of_the_hours_whichever_is_less(clock):
    out = console(terminal=False)
    with Display("demo", 100_000, hours=0.5, console=out, clock=clock) as display:
        for step in range(1, 61):
            clock.now += 10
            display.update(step, row(5.0, seconds=10.0 * step))
    assert " · 29m 50s left · " in out.file.getvalue().splitlines()[0]
    assert " · 20m 0s left · " in out.file.getvalue().splitlines()[-1]


def test_the_hours_before_a_resume_are_used_up_before_a_step_is_logged(clock):
    out = console(terminal=False)
    with Display(
        "demo", 100_000, step=900, hours=10, seconds=9 * 3600, console=out, clock=clock
    ) as d:
        for step in range(901, 904):
            clock.now += 600
            d.advance(step, 9 * 3600 + 600.0 * (step - 900))
    assert "901/100,000 · 50m 0s left" in out.file.getvalue()
    assert "903/100,000 · 30m 0s left" in out.file.getvalue()


def test_a_student_whose_head_is_not_trained_has_no_accuracy_but_words(clock):
    out, students = console(terminal=False), {"students/half/loss": 6.0}
    with Display("demo", 3, console=out, clock=clock) as display:
        for step, untrained in enumerate([["students/half"], None, []], start=1):
            clock.now += 10
            display.update(step, row(1.0, **students), untrained=untrained)
    lines = out.file.getvalue().splitlines()
    told = [line.endswith("half: loss 6.000, head not trained") for line in lines]
    assert told == [True, True, False]


def test_the_masked_words_of_a_learner_with_other_terms_are_shown_too(clock):
    """The losses of learners with different terms cannot be compared; `mlm` can."""
    shown = "teacher: loss 4.000, accuracy 25.0%; half: loss 7.500, mlm 5.000, accuracy 20.0%\n"
    out = console(terminal=False)
    both = {"students/half/loss": 7.5, "students/half/mlm": 5.0, "students/half/soft_kl": 2.5}
    with Display("demo", 1, console=out, clock=clock) as display:
        display.update(1, row(4.0, **{"teacher/mlm": 4.0}, **both))
        one = {"val/one/teacher/accuracy": 0.3, "val/one/students/half/accuracy": 0.1}
        two = {"val/two/teacher/accuracy": 0.2, "val/two/students/half/accuracy": 0.3}
        display.update(1, {**one, **two})
    assert out.file.getvalue().endswith(shown)


def test_a_waiting_student_gets_its_loss_once_it_has_one(clock):
    out = console(terminal=False)
    with Display("demo", 3, console=out, clock=clock) as display:
        for step, more in enumerate([{}, {"students/half/loss": 6.0}, {}], start=1):
            clock.now += 10
            waiting = [] if more else ["students/half"]
            display.update(step, row(1.0, **more), waiting if step == 1 else [])
    first, second, third = out.file.getvalue().splitlines()
    assert first.endswith("half: waiting")
    assert second.endswith("half: loss 6.000")
    assert third.endswith("half: loss 6.000")


def test_held_out_accuracy_is_shown_beside_the_loss(clock):
    out = console(terminal=False)
    with Display("demo", 10, console=out, clock=clock) as display:
        display.update(1, row(2.5))
        clock.now += 10
        held_out = {"val/prose/teacher/loss": 9.9, "val/prose/teacher/accuracy": 0.234}
        display.update(1, {"step": 1, **held_out})
    assert out.file.getvalue().splitlines()[-1].endswith("teacher: loss 2.500, accuracy 23.4%")


def test_the_primary_metric_is_the_one_beside_the_loss(clock):
    out, held_out = console(terminal=False), "val/prose/teacher/"
    primary = Column("matthews", "MCC", NUMBER)
    with Display("demo", 10, primary=primary, console=out, clock=clock) as display:
        scores = {f"{held_out}accuracy": 0.234, f"{held_out}matthews": 0.51}
        display.update(1, row(2.5, **scores))
    assert out.file.getvalue().splitlines()[-1].endswith("teacher: loss 2.500, MCC 0.510")


def test_time_left_follows_the_speed_of_the_last_minute_also_after_a_resume(clock):
    out = console(terminal=False)
    with Display("demo", 2000, step=1000, console=out, clock=clock) as display:
        for step in range(1001, 1101):  # slow: one step in ten seconds
            clock.now += 10
            display.update(step, row(1.0))
        assert "2h 30m left" in out.file.getvalue().splitlines()[-1]
        for step in range(1101, 1221):  # fast: one step in a second
            clock.now += 1
            display.update(step, row(1.0))
    assert "13m 0s left" in out.file.getvalue().splitlines()[-1]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_on_a_terminal_the_last_state_stays_and_messages_go_above(clock, width):
    out = console(terminal=True, width=width)
    with Display("demo", 10, console=out, clock=clock) as display:
        for step in range(1, 11):
            clock.now += 1
            display.update(step, row(1.0, **{"students/tiny/loss": 2.0}))
            if step == 5:
                display.say("a [bold]message[/bold]")
    text = out.file.getvalue()
    assert "a [bold]message[/bold]" in text
    assert "10/10" in text
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is back
    assert "tiny: loss 2.000" in text


# A shell lets what it starts in the background ignore SIGINT.
PROGRAM = """
import signal, time
from trainer.record.display import Display
from trainer.scoring.columns import NUMBER, Column
signal.signal(signal.SIGINT, signal.default_int_handler)
with Display("demo", 10**6) as display:
    for step in range(10**6):
        display.update(step, {"teacher/loss": 1.0})
        time.sleep(0.01)
"""


def test_ctrl_c_gives_the_terminal_back():
    terminal, end = pty.openpty()
    environment = os.environ | {"TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=end, stderr=subprocess.DEVNULL, env=environment
    )
    os.close(end)
    shown = b""
    while b"1.000" not in shown:
        shown += read(terminal)
    process.send_signal(signal.SIGINT)
    shown += _rest(terminal)
    assert process.wait(60) == -signal.SIGINT
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l") >= 0


def _rest(terminal):
    content = b""
    while True:
        try:
            piece = read(terminal)
        except OSError:  # the other end is closed
            return content
        if not piece:
            return content
        content += piece
