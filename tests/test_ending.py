"""A command that SIGTERM or SIGHUP ends leaves nothing behind that it had begun to write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import tandem
from commands.ending import unwind_all, unwound
from tests import waiting
from tests.conftest import REPOSITORY, command_environment
from tests.fork_server import Program, command_line

OWN = {"train", "rehearse", "store", "finetune", "evaluate", "data build", "tokenizer train"}


def predict_for_ever(out: str) -> None:
    """`tandem predict` of a model that never answers, also in tests that nohup has started."""
    import trainer.prediction.predicting as predicting

    def never(*_: object) -> Iterator[dict[str, Any]]:
        Path(f"{out}.asked").touch()
        waiting.for_ever()
        yield {}

    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    predicting.predictions = never  # type: ignore[assignment]
    command_line(["predict", "none", "-", "--out", out])


def catch_everything(folder: str) -> None:
    """A library that goes on after whatever was raised in it."""
    with unwound():
        try:
            Path(folder, "there").touch()
            waiting.for_ever()
        except BaseException:
            Path(folder, "caught").touch()


def fork_then_wait(folder: str) -> None:
    with unwound():
        child = os.fork()
        try:
            Path(folder, "forked" if child == 0 else str(child)).touch()
            waiting.for_ever()
        finally:
            Path(folder, f"unwound{child}").touch()


def started(function: Any, argument: Path) -> Program:
    return Program(function, str(argument), environment=command_environment())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_predictions_that_were_begun_are_removed(tmp_path: Path, number: int) -> None:
    command = started(predict_for_ever, tmp_path / "p.jsonl")
    asked = tmp_path / "p.jsonl.asked"
    waiting.until(asked.exists, "the part of the file, and the first answer")
    asked.unlink()
    command.send_signal(number)
    if number == signal.SIGHUP:  # as a terminal and its shell do
        command.send_signal(number)
    code = command.wait(60)
    assert code == (1 if number == signal.SIGINT else -number)
    assert "Traceback" not in command.communicate(0)[1]
    assert not list(tmp_path.iterdir())


def test_a_signal_that_a_library_catches_ends_the_command_all_the_same(tmp_path: Path) -> None:
    command = started(catch_everything, tmp_path)
    waiting.until((tmp_path / "there").exists)
    command.send_signal(signal.SIGTERM)
    assert command.wait(60) == -signal.SIGTERM
    assert (tmp_path / "caught").exists()


def test_a_fork_is_ended_at_once(tmp_path: Path) -> None:
    """Only the process that has begun to write removes it."""
    command = started(fork_then_wait, tmp_path)
    waiting.until((tmp_path / "forked").exists)
    waiting.until(lambda: len(list(tmp_path.iterdir())) == 2)
    (child,) = (int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal())
    os.kill(child, signal.SIGTERM)
    os.kill(command.pid, signal.SIGTERM)
    assert command.wait(60) == -signal.SIGTERM
    assert (tmp_path / f"unwound{child}").exists()
    assert not (tmp_path / "unwound0").exists()


def test_handlers_of_others_are_left_alone() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with unwound():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            with unwound():
                pass
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGHUP, before[1])


STOP = """
import importlib.machinery as machinery, sys
def stop(*_):
    raise KeyboardInterrupt
find = machinery.PathFinder.find_spec
if (module := sys.argv[1]) != "parsing":
    machinery.PathFinder.find_spec = lambda name, *a: (stop if name == module else find)(name, *a)
else:
    import click
    click.Group.parse_args = stop
import tandem
tandem.main(["data", "check", "x"])
"""


@pytest.mark.parametrize(
    "when", ["click", "commands.data", "configs.progress", "data_pipeline", "parsing"]
)
def test_ctrl_c_is_one_line_whenever_it_comes(when: str) -> None:
    """As a module is imported, by `tandem` or by a command, and as words are parsed."""
    words = [sys.executable, "-c", STOP, when]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (1, b"tandem: interrupted\n")


WITHOUT_STREAMS = """
import os, pathlib, sys
import tandem
try:
    tandem.main(["list", "devices"])
finally:
    ends = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
    pathlib.Path(sys.argv[1]).write_text(" ".join(ends))
"""


def test_a_command_whose_standard_streams_are_closed_runs(tmp_path: Path) -> None:
    """And no file that it opens gets a descriptor to which libraries print."""
    words = [sys.executable, "-c", WITHOUT_STREAMS, str(tmp_path / "ends")]
    closing = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words]
    assert subprocess.run(closing, cwd=REPOSITORY, check=False).returncode == 0
    assert (tmp_path / "ends").read_text().split() == [os.devnull] * 3


AT_EXIT = """
import atexit, os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(os.kill, os.getpid(), signal.SIGINT)  # a library's end, while which it comes
import tandem
tandem.main(["list", "devices"])
"""


def test_ctrl_c_ends_a_command_that_is_done_without_a_traceback() -> None:
    words = [sys.executable, "-c", AT_EXIT]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"")
    assert b"h100" in done.stdout


def leaves(group: click.Group, above: str = "") -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        more = leaves(command, f"{above}{name} ") if isinstance(command, click.Group) else {}
        found |= more or {f"{above}{name}": command}
    return found


def test_every_command_but_those_that_stop_by_themselves_is_unwound() -> None:
    """The names of the others are those of commands."""
    found = leaves(tandem.main)
    assert found.keys() >= OWN
    wrapped = {name for name, one in found.items() if hasattr(one.callback, "__wrapped__")}
    assert found.keys() - wrapped == OWN
    again = click.Group(commands={"a": click.Command("a", callback=lambda: 3)})
    unwind_all(again, but=["b"])
    assert again.commands["a"].callback() == 3  # type: ignore[misc]
