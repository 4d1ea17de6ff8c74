"""Writing ``metrics.jsonl``, and restoring it when a run resumes.

A full disk or a power loss can damage the file. It must neither end the run nor go unnoticed. Rows
that cannot be written wait in memory. A checkpoint is written only after the rows before it are on
disk; it stores their number and a copy of the newest.
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

# The size of a checkpoint's copy of the newest rows: thousands of them.
KEPT_BYTES = 4 * 2**20

_log = logging.getLogger(__name__)


class MetricsLog:
    """Appends rows to a ``metrics.jsonl`` whose last line is complete.

    A row is in the file when `append` returns. If there is an `error`, the row is written with the
    next one, or when the log is closed.
    """

    def __init__(self, path: Path, rows: int = 0) -> None:
        """`rows` is the number of rows in the file so far."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self.rows = path, rows
        self._file = path.open("a+b", buffering=0)
        self._unwritten = b""
        self.error = ""  # why rows could not be written; empty when all are

    def append(self, row: Mapping[str, float]) -> None:
        """Write a row, which must have ``step``. Values are Python or NumPy numbers."""
        assert "step" in row, f"a metrics row without a step: {row}"
        self._unwritten += encode(row).encode() + b"\n"
        self.rows += 1
        self._write()

    def rows_for_checkpoint(self) -> Callable[[], bytes]:
        """A function that fsyncs the rows so far and returns the newest, for a checkpoint.

        It may be called from any thread while rows are appended; it raises OSError.
        """
        size, unwritten = os.fstat(self._file.fileno()).st_size, self._unwritten

        def newest() -> bytes:
            os.fsync(self._file.fileno())
            begin = max(0, size - KEPT_BYTES)
            lines = os.pread(self._file.fileno(), size - begin, begin)
            return lines[lines.find(b"\n") + 1 if begin else 0 :] + unwritten

        return newest

    def close(self) -> None:
        """Write and fsync all rows, and close the file."""
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
    """The result of `resume`, in rows."""

    rows: int  # in the file now
    restored: int  # of these, the ones that only the checkpoint had
    lost: int  # in the file when the checkpoint was written, but in neither now

    def __str__(self) -> str:
        """A message for the user; empty if nothing was missing."""
        if not self.restored and not self.lost:
            return ""
        missing, all_rows = self.restored + self.lost, self.rows + self.lost
        return (
            f"metrics.jsonl lacked {missing} of {all_rows} rows: {self.restored} restored from "
            f"the checkpoint, {self.lost} lost"
        )


def resume(path: Path, step: int, kept: bytes = b"", expected: int | None = None) -> Resumed:
    """Restore the file to its state after `step`: drop later rows, add missing ones.

    A resumed run repeats the steps after its checkpoint, and logs them again. Lines that are not
    rows (torn lines, or NULs after a power loss) are dropped. The result is always a new file: an
    older attempt that is still running keeps writing to the old one.

    Args:
        step: the checkpoint's step.
        kept: the checkpoint's copy of the newest rows.
        expected: the number of rows when the checkpoint was written; None if unknown.

    Raises OSError, with the path; the file is unchanged then.
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
    """The lines before the `newest` ones; several rows may share the first one's step."""
    if not newest:
        return there
    first, known = decode(newest[0])["step"], set(newest)
    return [line for line in there if decode(line)["step"] <= first and line not in known]


def _salvaged(path: Path) -> Iterator[tuple[Row, bytes]]:
    return _salvage(path.read_bytes()) if path.exists() else iter(())


def _salvage(content: bytes) -> Iterator[tuple[Row, bytes]]:
    """Every row with its line; an incomplete last line is left out."""
    for line in content.split(b"\n")[:-1]:
        line = line.lstrip(b"\0")
        try:
            yield decode(line), line + b"\n"
        except ValueError:
            continue
