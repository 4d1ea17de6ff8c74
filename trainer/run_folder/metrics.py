"""The metrics of a run: ``metrics.jsonl``, one line per logged step.

The report, Weights & Biases and ``tandem status`` are all computed from this file, so it is written
before them. Floats round-trip exactly: each is the shortest text with the same
bits. JSON has no NaN or infinity: they are the strings "NaN", "Infinity" and "-Infinity", which
`read` converts back. So any strict JSON parser can read the file.

Keys, all optional but ``step``:

====================================  ==============================================================
``step``, ``tokens``                  optimizer steps done; tokens read since step 0
``seconds``                           training time since step 0, over all restarts
``padding``                           fraction of the step's positions that are padding
``unreadable``                        sequences that could not be read so far, if any
``LEARNER/loss``, ``LEARNER/TERM``    mean over the global batch; TERM is a term of the objective
``LEARNER/lr``, ``LEARNER/grad_norm``
``LEARNER/skipped_steps``             total so far
``LEARNER/overflows``                 total so far, in fp16, with the present ``LEARNER/loss_scale``
``LEARNER/lead``                      with `min_lead`: how far its teacher is ahead, in nats
``LEARNER/aligned_masked``            with another tokenizer than its teacher's: the share of a
                                      learner's masked tokens at which predictions are compared
``LEARNER/aligned_tokens``            the share of its tokens whose states are compared
``LEARNER/seconds_PART``              time of the logged step on rank 0; PART is forward, backward,
                                      step, or communication (which the others include)
``LEARNER/bytes_communication``       bytes that rank 0 passed to collectives in that step
``LEARNER/bytes_peak``                peak of allocated memory while the learner trained; on GPUs
``tokens_per_second``, ``mfu``        the whole job's, since the last logged step
``data_wait``                         fraction of that time in which rank 0 waited for batches
``memory``                            peak bytes so far, the maximum over ranks
``checkpoint_stall``                  seconds that checkpoints stalled training, since the last
                                      logged step
``slowest_rank``                      busy time of the slowest rank, divided by the median
``rollbacks``                         entries of `rollback` that have been applied
``restarts``                          how often the run has been restarted so far
``val/CORPUS/LEARNER/loss``           on the held-out split of a corpus; also ``accuracy`` and,
                                      where there are pairs, ``pair_accuracy``
``val/TASK/LEARNER/HEAD_SCORE``       on a task's validation file, such as
                                      ``single_sentence_accuracy``; of a translation ``bleu``
``val/tasks/LEARNER/task_mean``       the mean of several tasks' primary scores
``average_``, ``next_token_``         before a score: of averaged weights; of next tokens in a job
                                      that also masks
====================================  ==============================================================

LEARNER is ``teacher``, ``teachers/NAME`` or ``students/NAME``. Rows may share a step
(training, then validation).

A full disk or a power loss can damage the file. It must neither end the run nor go unnoticed. Rows
that cannot be written wait in memory. A checkpoint is written only after the rows before it are on
disk; it stores their number and a copy of the newest.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.durable import atomic_file
from configs.strict_json import is_torn, parse_json
from trainer.errors import TrainingError

Row = dict[str, float]
TASKS = "tasks"  # stands for a corpus in the keys of scores over several tasks

# Measurements, which differ between two equal runs.
MEASURED = (
    "seconds",
    "tokens_per_second",
    "data_wait",
    "mfu",
    "memory",
    "checkpoint_stall",
    "slowest_rank",
    "restarts",
)
# The size of a checkpoint's copy of the newest rows: thousands of them.
KEPT_BYTES = 4 * 2**20
_log = logging.getLogger(__name__)


def encode(row: Mapping[str, float]) -> str:
    """A row as strict JSON, without the newline."""
    return json.dumps({key: _to_json(value) for key, value in row.items()}, allow_nan=False)


def decode(line: str | bytes) -> Row:
    """The inverse of `encode`. Raises ValueError if the line is not a row."""
    row = parse_json(line)
    if not isinstance(row, dict) or "step" not in row:
        raise ValueError("not a metrics row")
    # Each line's keys are new texts, which would be half of what the rows take.
    return {sys.intern(key): _from_json(value) for key, value in row.items()}


def read(path: Path) -> list[Row]:
    """All rows in file order; none if there is no file. A torn last line is ignored.

    Raises TrainingError, naming file and line, if any other line is not a row.
    """
    rows: list[Row] = []
    if not path.exists():
        return rows
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if is_torn(line):
                break
            try:
                rows.append(decode(line))
            except ValueError as error:
                raise TrainingError(
                    f"{path}: line {number} is not a row of metrics; repair or delete the line"
                ) from error
    return rows


def series(rows: list[Row], key: str) -> tuple[list[float], list[float]]:
    """The steps and the values of the rows that have a column."""
    points = [(row["step"], row[key]) for row in rows if key in row]
    return [step for step, _ in points], [value for _, value in points]


def is_measured(key: str) -> bool:
    """Whether a column is a measurement, which may differ between equal runs."""
    return key in MEASURED or "/seconds_" in key or "/bytes_" in key


def held_out_key(corpus: str, learner: str, column: str) -> str:
    """The key of a held-out score."""
    return f"val/{corpus}/{learner}/{column}"


def split_held_out(key: str) -> tuple[str, str, str] | None:
    """The inverse of `held_out_key`; None for any other key."""
    val, _, rest = key.partition("/")
    corpus, _, score = rest.partition("/")
    learner, _, column = score.rpartition("/")
    return (corpus, learner, column) if val == "val" and learner else None


def held_out(row: Mapping[str, float], learner: str, column: str) -> float | None:
    """A learner's held-out score in a row, the mean over its corpora; None if it has none."""
    scores = [
        value
        for key, value in row.items()
        if (parts := split_held_out(key)) and parts[1:] == (learner, column)
    ]
    return sum(scores) / len(scores) if scores else None


def _to_json(value: Any) -> int | float | str:
    if isinstance(value, int):
        return value
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _from_json(value: Any) -> float:
    if type(value) is float:  # as nearly all are
        return value
    if not isinstance(value, int | float | str):
        raise ValueError("not a number")
    return float(value) if isinstance(value, str) else value


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

    def __exit__(self, *exception: object) -> None:
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
    newest = [*_salvage(io.BytesIO(kept))]
    first, missing = newest[0][0] if newest else step, {line for _, line in newest}
    copied, before = frozenset(missing), []
    with path.open("rb") if path.exists() else io.BytesIO() as file:
        for at, line in _salvage(file):
            if at <= step and line in copied:
                missing.discard(line)
            elif at <= min(step, first):  # several rows may share the first one's step
                before.append(line)
    lines = [*before, *(line for _, line in newest)]
    if path.exists() or lines:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as new:
            new.writelines(lines)
    restored = sum(line in missing for _, line in newest)
    return Resumed(len(lines), restored, max(0, (expected or 0) - len(lines)))


def _salvage(file: Iterable[bytes]) -> Iterator[tuple[float, bytes]]:
    """Every row's step with its line; an incomplete last line is left out."""
    for line in file:
        if line.endswith(b"\n"):
            line = line.lstrip(b"\0")
            with contextlib.suppress(ValueError):
                yield decode(line)["step"], line
