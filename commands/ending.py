"""The end of commands: what SIGTERM or SIGHUP interrupts, and a terminal that closes.

By default these signals, which SLURM and a closed terminal send, end Python at once. Here they
unwind a command as Ctrl-C does, and then end the process as they would have.
"""

import atexit
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import click


def open_closed_streams() -> None:
    """Put the null device where the standard streams are closed, as some daemons start commands.

    Otherwise Python has no stream there, and the next file that is opened takes its descriptor, to
    which libraries print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))


def ignore_write_errors() -> None:
    """Make standard output and error drop text that cannot be written.

    A closed terminal, a reader that has gone or a full disk must not end a job. Streams without a
    file (those of a test) are left alone.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            number = stream.fileno()
        except (AttributeError, OSError, ValueError):  # no stream, no file, or closed
            continue
        setattr(sys, name, _dropping(stream, number))


def _dropping(stream: Any, number: int) -> io.TextIOWrapper:
    """A stream of this encoding, on a file that drops what it cannot write."""
    file = io.BufferedWriter(_DroppingFile(number, "w", closefd=False))
    return io.TextIOWrapper(
        file,
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _DroppingFile(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def end_at_once_on_interrupt() -> None:
    """Let Ctrl-C end the process while Python closes down, where it would print a traceback."""
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)


SIGNALS = (signal.SIGTERM, signal.SIGHUP)
REPEAT_SECONDS = 1.0  # a closed terminal may send SIGHUP twice; a later signal is a second request


def unwind_all(group: click.Group, but: Collection[str], above: str = "") -> None:
    """Make the signals unwind each command of a group and its groups, `but` some, by name."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            unwind_all(command, but, f"{above}{name} ")
        elif f"{above}{name}" not in but and command.callback is not None:
            command.callback = unwound()(command.callback)


@contextmanager
def unwound() -> Iterator[None]:
    """Unwind the code within at the first of the signals, and then let it end the process.

    A signal that is ignored (by nohup) or handled already is left alone. Does nothing in a thread
    other than the main one, which alone may handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = _Handler()
    ours = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
        if handler.received is not None:  # also where a library has caught our exception
            _end_by(handler.received)


class _Handler:
    """Raises SystemExit at the first signal, but not in a fork of the process."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._process = os.getpid()
        self._ends_at = float("inf")  # from when on another signal ends the process at once

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if os.getpid() != self._process or now >= self._ends_at:
            _end_by(number)
        if self.received is None:
            self.received, self._ends_at = number, now + REPEAT_SECONDS
            raise SystemExit(128 + number)


def _end_by(number: int) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)  # the signal is blocked
