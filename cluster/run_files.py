"""Reading a run folder for `tandem status`, while a job may be writing to it.

Torn or foreign lines and files are left out, so that they do not hide the rest.
"""

import contextlib
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.strict_json import is_torn, parse_json

STAGES = "stages"  # of a submission that does not train, a stage a line
TAIL_BYTES = 256 * 1024  # read from the end of metrics.jsonl: hundreds of rows

RECORDS = ("metrics.jsonl", "slurm.jsonl", "alerts.jsonl", "slow_ranks.json", "setbacks.json")

NUMBER = (int, float)
EVENT_TYPES = {"event": str, "time": NUMBER, "job": str}  # of what the status is inferred from
ATTEMPT_TYPES = {"process": int, "machine": str, "started": int, "time": NUMBER, "job": str}

Row = dict[str, Any]


def trains(run: Path) -> bool:
    """Whether a folder is a run's, rather than that of stored predictions, a suite or scores."""
    newest = max(run.glob("submissions/*/job.sbatch"), default=None)
    return newest is None or not newest.with_name(STAGES).exists()


def finished_runs(suite: Path) -> int | None:
    """How many runs of a suite have finished; None of a folder that is no suite's."""
    runs = suite / "runs"
    return len(list(runs.glob("*/evaluation.json"))) if runs.is_dir() else None


def newest_rows(file: Path) -> list[Row]:
    """The last rows of a ``metrics.jsonl``, oldest first; each has a step."""
    return [row for row in map(_numbers, _newest_content(file)[:-1]) if row]


def damaged_files(run: Path) -> list[str]:
    """A line for each damaged file, saying what is missing from the status because of it."""
    results, metrics = run / "evaluation.json", run / "metrics.jsonl"
    faults = []
    if results.exists() and not isinstance(json_object(results).get("step"), int):
        faults.append("evaluation.json is damaged; tandem train writes it again")
    *rows, last = _newest_content(metrics)
    if not (all(map(_numbers, rows)) and is_torn(last)):
        faults.append("metrics.jsonl is damaged; its other rows are shown")
    records = (run / name for name in RECORDS)
    strange = (path.name for path in records if path.exists() and not path.is_file())
    return faults + [f"{name} is not a file; move it away" for name in strange]


def events_of(run: Path) -> list[dict[str, Any]]:
    """The batch script's events, oldest first; each has an ``event`` and a ``reason``."""
    events = _objects(run / "slurm.jsonl")
    return [
        {"reason": "", **event}
        for event in events
        if "event" in event and _fits(event, EVENT_TYPES)
    ]


def alerts_of(run: Path) -> list[str]:
    """A line for each alert, oldest first."""
    alerts = _objects(run / "alerts.jsonl")
    return [
        f"{alert['title']}: {alert['text']}"
        for alert in alerts
        if {"title", "text"} <= alert.keys()
    ]


def json_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where it cannot be read."""
    try:
        return _object(file.read_bytes())
    except OSError:
        return {}


def newest_attempt(run: Path) -> tuple[dict[str, Any], float]:
    """The newest attempt's record, empty if damaged, and when it was last touched (Unix time)."""
    records = sorted(run.glob("attempts/*.json"))
    if not records:
        return {}, 0.0
    record = json_object(records[-1])
    return record if _fits(record, ATTEMPT_TYPES) else {}, records[-1].stat().st_mtime


def failure_of(run: Path) -> str:
    """Why the newest attempt failed, in one line, by its first rank to fail; empty if unknown."""
    newest = max(run.glob("attempts/*.json"), default=None)
    noted = json_object(newest.with_suffix(".failure")) if newest else {}
    return " ".join(str(noted.get("error", "")).split())


def newest_checkpoint(run: Path) -> tuple[int | None, float | None]:
    """The step of the newest checkpoint that counts, and its age in seconds; None: there is none.

    As for the trainer, one that the newest attempt did not find counts only if no earlier attempt
    wrote it: the run has rolled back behind it, or whoever wrote it was cut off.
    """
    folders = {
        int(path.name[5:]): path
        for path in run.glob("checkpoints/step-*")
        if path.name[5:].isdigit()
    }
    attempt, known = _found_checkpoints(run)
    for step in sorted(folders, reverse=True):
        if step in known or _writer(folders[step]) >= attempt:
            with contextlib.suppress(FileNotFoundError):  # a live run has just deleted it
                return step, time.time() - folders[step].stat().st_mtime
    return None, None


def _found_checkpoints(run: Path) -> tuple[int, list[Any]]:
    """The newest attempt that recorded which checkpoints count, and their steps; 0: none did."""
    records = (path for path in run.glob("attempts/*.json") if path.stem.isdecimal())
    for record in sorted(records, reverse=True):
        steps = json_object(record).get("checkpoints")
        if isinstance(steps, list):
            return int(record.stem), steps
    return 0, []


def _writer(checkpoint: Path) -> float:
    """The attempt that wrote a checkpoint; infinite, so that it counts, where that is unknown."""
    attempt = json_object(checkpoint / "trainer.json").get("attempt")
    return attempt if isinstance(attempt, int) else math.inf


def newest_log(run: Path) -> str | None:
    """The log that was last written to."""
    logs = [*run.glob("logs/rank-000.log"), *run.glob("logs/slurm-*.log")]
    if not logs:
        return None
    return str(max(logs, key=lambda path: path.stat().st_mtime))


def _newest_content(file: Path) -> list[bytes]:
    """The whole lines among the last `TAIL_BYTES`, and the rest behind them.

    The rest is empty, or a line that is being written.
    """
    if not file.is_file():
        return [b""]
    with file.open("rb") as stream:
        before = file.stat().st_size - TAIL_BYTES
        if before > 0:
            stream.seek(before)
            stream.readline()
        return stream.read().split(b"\n")


def _objects(file: Path) -> list[dict[str, Any]]:
    lines = file.read_bytes().splitlines() if file.is_file() else []
    return [row for row in map(_object, lines) if row]


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _fits(record: dict[str, Any], types: Mapping[str, Any]) -> bool:
    """Whether the values that a record has of these keys are of their types."""
    return all(isinstance(record[key], kind) for key, kind in types.items() if key in record)


def _numbers(line: bytes) -> Row:
    """A row, whose values may be the strings "NaN" and "Infinity"; empty where it is not a row."""
    row = _object(line)
    try:
        numbers: Row = {key: float(value) for key, value in row.items()}
    except (TypeError, ValueError, OverflowError):
        return {}
    return {**numbers, "step": int(row["step"])} if isinstance(row.get("step"), int) else {}
