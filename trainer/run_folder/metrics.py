"""The record of a run: ``metrics.jsonl``, one line per logged step.

Everything that shows a run (the report, Weights & Biases, ``tandem status``) is computed from this
file, so it is written first (see `metrics_log`) and read back exactly: a float is the shortest text
with the same bits.
JSON has no NaN or infinity: they are the strings "NaN", "Infinity" and "-Infinity", which
`read` turns back into floats, and any strict JSON parser can read the file.

Keys, all optional but ``step``:

====================================  ==============================================================
``step``, ``tokens``                  optimizer steps done; tokens read since step 0
``seconds``                           training time since step 0, over all restarts
``padding``                           share of the step's positions that hold no token
``unreadable``                        sequences that could not be read so far, where there are any
``LEARNER/loss``, ``LEARNER/TERM``    mean over the global batch; TERM is one part of the objective
``LEARNER/lr``, ``LEARNER/grad_norm``
``LEARNER/skipped_steps``             how many so far
``LEARNER/seconds_PART``              of the logged step on rank 0: forward, backward, step, and the
                                      communication in them
``LEARNER/bytes_communication``       handed to collectives in that step, by rank 0
``LEARNER/bytes_peak``                allocated at most while it was at work; on GPUs
``tokens_per_second``, ``mfu``        the whole job's, since the last logged step
``data_wait``                         share of the time that rank 0 waited for batches, since then
``memory``                            bytes, the most so far and the largest over ranks
``checkpoint_stall``                  seconds that training stood still, since the last logged step
``slowest_rank``                      how long the slowest rank computes, over the median
``rollbacks``                         entries of `rollback` that were carried out
``restarts``                          how often the run was started again, so far
``val/CORPUS/LEARNER/loss``,            on the held-out split of a corpus; also ``accuracy`` and,
                                      where there are pairs, ``pair_accuracy``
====================================  ==============================================================

LEARNER is ``teacher`` or ``students/NAME``. Rows may share a step (training, then validation).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from configs.strict_json import parse_json
from trainer.errors import TrainingError

Row = dict[str, float]

# What depends on the machine and the hour, and differs between two equal runs.
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


def encode(row: Mapping[str, float]) -> str:
    """One row as a line of strict JSON, without the line end."""
    return json.dumps({key: _to_json(value) for key, value in row.items()}, allow_nan=False)


def decode(line: str | bytes) -> Row:
    """The inverse of `encode`. Raises ValueError when the line is not a row."""
    row = parse_json(line)
    if not isinstance(row, dict) or "step" not in row:
        raise ValueError("not a metrics row")
    return {key: _from_json(value) for key, value in row.items()}


def read(path: Path) -> list[Row]:
    """All rows in file order; none when there is no file. A torn last line is left out.

    Raises TrainingError, naming file and line, when any other line is not a row.
    """
    return list(_rows(path))


def series(rows: list[Row], key: str, against: str = "step") -> tuple[list[float], list[float]]:
    """The column `key` as (x, y): only rows that have both keys, x from the column `against`."""
    points = [(row[against], row[key]) for row in rows if key in row and against in row]
    return [x for x, _ in points], [y for _, y in points]


def is_measured(key: str) -> bool:
    """Whether a column is a measurement, which equal runs need not agree on."""
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


def held_out(row: Row, learner: str, column: str) -> float | None:
    """A learner's score in a row, the mean over its corpora; None where the row has none."""
    scores = [
        value
        for key, value in row.items()
        if (parts := split_held_out(key)) and parts[1:] == (learner, column)
    ]
    return sum(scores) / len(scores) if scores else None


def learners(rows: list[Row]) -> list[str]:
    """The learners that have a loss in `rows`: the teacher, then students as they appear."""
    names: dict[str, None] = {}
    for row in rows:
        for key in row:
            name, _, column = key.rpartition("/")
            if held_out := split_held_out(key):
                _, name, column = held_out
            if column == "loss" and name:
                names.setdefault(name)
    return sorted(names, key=lambda name: name != "teacher")


def _rows(path: Path) -> Iterator[Row]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decode(line)
            except ValueError as error:
                raise TrainingError(
                    f"{path}: line {number} is not a row of metrics; repair or remove the line"
                ) from error


def _to_json(value: Any) -> int | float | str:
    if isinstance(value, int):
        return value
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _from_json(value: Any) -> float:
    return float(value) if isinstance(value, str) else value
