"""The metrics of a run: ``metrics.jsonl``, one line per logged step.

The report, Weights & Biases and ``tandem status`` are all computed from this file, so it is written
before them (see `metrics_log`). Floats round-trip exactly: each is the shortest text with the same
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
====================================  ==============================================================

LEARNER is ``teacher``, ``teachers/NAME`` or ``students/NAME``. Rows may share a step
(training, then validation).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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


def encode(row: Mapping[str, float]) -> str:
    """A row as strict JSON, without the newline."""
    return json.dumps({key: _to_json(value) for key, value in row.items()}, allow_nan=False)


def decode(line: str | bytes) -> Row:
    """The inverse of `encode`. Raises ValueError if the line is not a row."""
    row = parse_json(line)
    if not isinstance(row, dict) or "step" not in row:
        raise ValueError("not a metrics row")
    return {key: _from_json(value) for key, value in row.items()}


def read(path: Path) -> list[Row]:
    """All rows in file order; none if there is no file. A torn last line is ignored.

    Raises TrainingError, naming file and line, if any other line is not a row.
    """
    return list(_rows(path))


def series(rows: list[Row], key: str, against: str = "step") -> tuple[list[float], list[float]]:
    """(x, y) of the rows that have both columns: x is the column `against`, y the column `key`."""
    points = [(row[against], row[key]) for row in rows if key in row and against in row]
    return [x for x, _ in points], [y for _, y in points]


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


def held_out(row: Row, learner: str, column: str) -> float | None:
    """A learner's held-out score in a row, the mean over its corpora; None if it has none."""
    scores = [
        value
        for key, value in row.items()
        if (parts := split_held_out(key)) and parts[1:] == (learner, column)
    ]
    return sum(scores) / len(scores) if scores else None


def learners(rows: list[Row]) -> list[str]:
    """The learners with a loss in `rows`: the teacher, then students in order of appearance."""
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
            if is_torn(line):
                return
            try:
                yield decode(line)
            except ValueError as error:
                raise TrainingError(
                    f"{path}: line {number} is not a row of metrics; repair or delete the line"
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
