"""Named pipes: a command that opens one to read it would wait for a writer, perhaps for ever."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_commands: list[None] = []  # those that run in this process


@contextmanager
def pipes_refused() -> Iterator[None]:
    """Within, opening a named pipe to read it raises OSError, in whichever library.

    A shell's pipes (/dev/fd/63) have a writer. Those that are opened to be written may be output.
    """
    _add_hook()
    _commands.append(None)
    try:
        yield
    finally:
        _commands.pop()


@cache
def _add_hook() -> None:
    sys.addaudithook(_check)  # cannot be removed


def _check(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not _commands:
        return
    path, _, flags = arguments
    if flags & os.O_ACCMODE == os.O_WRONLY or not isinstance(path, (str, bytes)):
        return
    name = os.fsdecode(path)
    if _is_pipe(name) and not name.startswith(("/dev/", "/proc/")):
        raise OSError(errno.EINVAL, "is a pipe; write its content to a file", name)


def _is_pipe(name: str) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(name).st_mode)
    except (OSError, ValueError):
        return False
