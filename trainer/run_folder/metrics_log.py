"""Writing ``metrics.jsonl``, and making it whole again when a run resumes.

What a disk does to a file that is appended to (a full disk, a power loss) must neither end a run
nor go unnoticed: rows that cannot be written wait in memory, and every checkpoint comes after the
rows before it are on the disk, knows how many there are, and has a copy of the newest.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from trainer.durable import atomic_write
from trainer.run_folder.metrics import Row, decode, encode

# Of the newest rows, that a checkpoint keeps: thousands of them.
KEPT_BYTES = 4 * 2**20

_log = logging.getLogger(__name__)


class MetricsLog:
    """Appends rows to a ``metrics.jsonl`` whose last line is whole.

    Every row is in the file when `append` returns, unless there is an `error`: it is written with
    the next one then, or when the log is closed.
    """

    def __init__(self, path: Path, rows: int = 0) -> None:
        """`rows` is how many the file has already."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self.rows = path, rows
        self._file = path.open("a+b", buffering=0)
        self._unwritten = b""
        self.error = ""  # why rows are not in the file yet

    def append(self, row: Mapping[str, float]) -> None:
        """Write one row; `row` must have ``step``. Values are Python or NumPy numbers."""
        assert "step" in row, f"a metrics row without a step: {row}"
        self._unwritten += encode(row).encode() + b"\n"
        self.rows += 1
        self._write()

    def kept_by_a_checkpoint(self) -> Callable[[], bytes]:
        """What puts the rows so far on the disk itself and returns the newest of them.

        It may be called from any thread, while rows are appended; it raises OSError.
        """
        size, unwritten = os.fstat(self._file.fileno()).st_size, self._unwritten

        def newest() -> bytes:
            os.fsync(self._file.fileno())
            begin = max(0, size - KEPT_BYTES)
            lines = os.pread(self._file.fileno(), size - begin, begin)
            return lines[lines.find(b"\n") + 1 if begin else 0 :] + unwritten

        return newest

    def close(self) -> None:
        """Put the rows on the disk itself, not only in the system's cache, and close."""
        self._write()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self.error = error.strerror or str(error)
        if self.error:
            lost = self._unwritten.count(b"\n")
            _log.warning("%s: %s; %d rows are not in it", self._path, self.error, lost)
        self._file.close()

    def _write(self) -> None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self.error = ""
        except OSError as error:
            self.error = error.strerror or str(error)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Resumed:
    """What `resume` made of a file."""

    rows: int  # that it has now
    restored: int  # of them, that only the checkpoint had
    lost: int  # that were there when the checkpoint was written, and are no more

    def __str__(self) -> str:
        """For a person; empty where nothing was missing."""
        if not self.restored and not self.lost:
            return ""
        missing, all_rows = self.restored + self.lost, self.rows + self.lost
        return (
            f"metrics.jsonl lacked {missing} of {all_rows} rows: {self.restored} are restored from "
            f"the checkpoint, {self.lost} are lost"
        )


def resume(path: Path, step: int, kept: bytes = b"", expected: int | None = None) -> Resumed:
    """Make the file what it was after `step`: without later rows, with those that are missing.

    A resumed run does the steps after its checkpoint again, and logs them again. `kept` is what
    the checkpoint has of the rows, `expected` how many there were; None where that is not known.
    Lines that are no rows (torn, or NULs after a power loss) are dropped. The file is always a new
    one afterwards: an older attempt that still runs, cut off, goes on writing to the old one.

    Raises OSError with the path in it; the file is as it was then.
    """
    there = [line for row, line in _salvaged(path) if row["step"] <= step]
    newest = [line for _, line in _salvage(kept)]
    lines = _before(there, newest) + newest
    if path.exists() or lines:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, b"".join(lines))
    found = set(there)
    restored = sum(line not in found for line in newest)
    return Resumed(len(lines), restored, max(0, (expected or 0) - len(lines)))


def _before(there: list[bytes], newest: list[bytes]) -> list[bytes]:
    """The lines that come before the `newest`: several rows may have their first one's step."""
    if not newest:
        return there
    first, known = decode(newest[0])["step"], set(newest)
    return [line for line in there if decode(line)["step"] <= first and line not in known]


def _salvaged(path: Path) -> Iterator[tuple[Row, bytes]]:
    return _salvage(path.read_bytes()) if path.exists() else iter(())


def _salvage(content: bytes) -> Iterator[tuple[Row, bytes]]:
    """Every row in it, with its line; a last line that does not end is none."""
    for line in content.split(b"\n")[:-1]:
        line = line.lstrip(b"\0")
        try:
            yield decode(line), line + b"\n"
        except ValueError:
            continue
