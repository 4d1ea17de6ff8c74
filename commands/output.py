"""Standard output of a job, whose terminal may close before the job ends."""

from __future__ import annotations

import io
import sys
from typing import Any


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
