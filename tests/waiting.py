"""Waits with a time limit: for a condition, for output, for a process."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import NoReturn

SECONDS = 60.0


def until(condition: Callable[[], object], what: str = "it", seconds: float = SECONDS) -> None:
    """Wait for a condition; the assertion names what did not happen."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.01)


def for_ever() -> NoReturn:
    """Sleep until a signal ends it.

    In short sleeps: Python sees a signal that comes just before a sleep only after it.
    """
    while True:
        time.sleep(0.01)


def read(file: int, seconds: float = SECONDS) -> bytes:
    """Some bytes from a pipe or terminal; empty at its end."""
    assert select.select([file], [], [], seconds)[0], "waited in vain for output"
    return os.read(file, 1 << 16)


def exit_code(pid: int, seconds: float = SECONDS) -> int:
    """The exit code of a child that was not started by `subprocess`; -n by signal n."""
    process = os.pidfd_open(pid)
    try:
        assert select.select([process], [], [], seconds)[0], f"process {pid} does not end"
    finally:
        os.close(process)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
