"""The terminal of a job, which may vanish before the job ends."""

from __future__ import annotations

import io
import sys
from typing import Any


def drop_what_cannot_be_written() -> None:
    """From here on a write to standard output or error never fails: what cannot be written is lost.

    A terminal that was closed, a reader that has gone or a full disk behind a redirection must not
    end a job. Streams that are no files (those of a test) are left alone.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            number = stream.fileno()
        except (AttributeError, OSError, ValueError):  # none, no file, or closed
            continue
        setattr(sys, name, _dropping(stream, number))


def _dropping(stream: Any, number: int) -> io.TextIOWrapper:
    """The same stream on a file that takes everything."""
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
