"""What a run is doing, read from its folder and from SLURM's queue; nothing is asked of the job.

The folder alone answers for a run that no scheduler started: the newest attempt's record names its
first process, and the age of ``metrics.jsonl`` tells a live run from a stalled one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.errors import LaunchError
from cluster.slurm import QueuedJob, of_run

TAIL_BYTES = 256 * 1024  # of metrics.jsonl: enough for hundreds of rows, whatever its length
STALLED_AFTER = 300.0  # seconds without a row, or ten times the usual pause if that is longer
SILENT_AFTER = 60.0  # seconds without a sign of life of a process on another machine
USUAL_ROWS = 10  # over which speed and the usual pause are measured

Row = dict[str, Any]


@dataclass(frozen=True)
class RunStatus:
    """One run. What is not known is None."""

    name: str
    state: str  # new, queued, running, stalled, stopped, failed, finished
    reason: str  # why it is in that state; may be empty
    step: int
    steps: int
    losses: dict[str, float]  # of each learner, the newest
    tokens_per_second: float | None
    seconds_left: float | None
    checkpoint: int | None  # the newest one's step
    checkpoint_age: float | None  # seconds
    attempts: int
    restarts: list[str]  # why each attempt that SLURM ran before the newest one ended
    job: str | None  # SLURM's id, while it is queued or runs
    log: str | None  # the file to open
    slow_ranks: list[str]  # a line for each rank that holds up the others
    alerts: list[str]  # the newest ones


def read_runs(root: Path, jobs: Sequence[QueuedJob] | None) -> list[RunStatus]:
    """Every run below `root` (the ``runs`` folder), by name; `jobs` as for `read_run`."""
    folders = sorted({path.parent for path in root.glob("*/config.yaml")} | _submitted(root))
    return [read_run(folder, jobs) for folder in folders]


def read_run(run: Path, jobs: Sequence[QueuedJob] | None) -> RunStatus:
    """The run in a folder, given SLURM's queue, or None where that cannot be read.

    Raises LaunchError where there is no run.
    """
    config = _config(run)
    rows = _rows(run / "metrics.jsonl")
    events = _json_lines(run / "slurm.jsonl")
    job = _job(run, events, jobs or [])
    steps = int(config.get("steps", 0))
    checkpoint, age = _checkpoint(run)
    if _finished(run, steps):
        state, reason = "finished", ""
    elif job and job.state == "PENDING":
        state, reason = "queued", job.reason
    elif job or _process_lives(run) or (jobs is None and _started(events)):
        state, reason = _live_state(run, rows)
    else:
        state, reason = _ended_state(rows, events, checkpoint)
    step = int(rows[-1]["step"]) if rows else 0
    speed = _newest(rows, "tokens_per_second")
    return RunStatus(
        name=run.name,
        state=state,
        reason=reason,
        step=step,
        steps=steps,
        losses=_losses(rows),
        tokens_per_second=speed if state == "running" else None,
        seconds_left=_seconds_left(rows, steps) if state == "running" else None,
        checkpoint=checkpoint,
        checkpoint_age=age,
        attempts=len(list(run.glob("attempts/*.json"))),
        restarts=[one["reason"] for one in events if one["event"] in ("requeue", "left", "ended")],
        job=job.id if job else None,
        log=_log(run),
        slow_ranks=_slow_ranks(run) if state == "running" else [],
        alerts=[f"{one['title']}: {one['text']}" for one in _json_lines(run / "alerts.jsonl")][-3:],
    )


def to_json(runs: Sequence[RunStatus]) -> str:
    """The runs as a JSON list; a loss that is not finite is null."""
    plain = [dataclasses.asdict(run) for run in runs]
    for run in plain:
        run["losses"] = {k: v if math.isfinite(v) else None for k, v in run["losses"].items()}
    return json.dumps(plain, indent=2, allow_nan=False)


def _submitted(root: Path) -> set[Path]:
    """Runs that wait for their first start, and so have no config of their own yet."""
    return {path.parents[2] for path in root.glob("*/submissions/*/config.yaml")}


def _config(run: Path) -> dict[str, Any]:
    files = [run / "config.yaml", *sorted(run.glob("submissions/*/config.yaml"), reverse=True)]
    for file in files:
        if file.is_file():
            return dict(yaml.safe_load(file.read_text()) or {})
    raise LaunchError(f"{run}: no run there (it has no config.yaml)")


def _live_state(run: Path, rows: Sequence[Row]) -> tuple[str, str]:
    quiet = _quiet_too_long(run, rows)
    if quiet is None:
        return "running", ""
    return "stalled", f"no step for {quiet / 60:.0f} minutes"


def _ended_state(
    rows: Sequence[Row], events: Sequence[dict[str, Any]], checkpoint: int | None
) -> tuple[str, str]:
    if events and not _started(events):
        failed = events[-1]["event"] == "final" and events[-1]["code"] != 75
        return "failed" if failed else "stopped", str(events[-1]["reason"])
    if not rows and not events:
        return "new", ""
    if checkpoint is not None and rows and checkpoint >= rows[-1]["step"]:
        return "stopped", ""
    return "failed", "it ended without saving; started again it goes on from its last checkpoint"


def _started(events: Sequence[dict[str, Any]]) -> bool:
    return bool(events) and events[-1]["event"] == "start"


def _finished(run: Path, steps: int) -> bool:
    file = run / "evaluation.json"
    return file.is_file() and json.loads(file.read_text())["step"] >= steps


def _process_lives(run: Path) -> bool:
    """Whether the newest attempt's first process is alive, as far as this machine can tell.

    One on another machine touches its record every few seconds.
    """
    records = sorted(run.glob("attempts/*.json"))
    if not records:
        return False
    try:
        record = json.loads(records[-1].read_text())
        if record.get("ended"):
            return False
        if record["host"] != socket.gethostname():
            return time.time() - records[-1].stat().st_mtime < SILENT_AFTER
        started = Path(f"/proc/{record['process']}").stat().st_mtime
    except (OSError, ValueError):
        return False
    return bool(started <= record["time"] + 1)


def _quiet_too_long(run: Path, rows: Sequence[Row]) -> float | None:
    """Seconds since the last sign of progress, where that is too long."""
    signs = [run / "metrics.jsonl", run / "config.yaml", *run.glob("attempts/*.json")]
    newest = max((file.stat().st_mtime for file in signs if file.exists()), default=time.time())
    recent = _training(rows)[-USUAL_ROWS:]
    spent = recent[-1]["seconds"] - recent[0]["seconds"] if len(recent) > 1 else 0.0
    usual = spent / max(1, len(recent) - 1)
    quiet = time.time() - newest
    return quiet if quiet > max(STALLED_AFTER, 10 * usual) else None


def _job(
    run: Path, events: Sequence[dict[str, Any]], jobs: Sequence[QueuedJob]
) -> QueuedJob | None:
    """The job of this run that SLURM has, the running one first."""
    numbers = {event["job"] for event in events}
    own = [*of_run(jobs, run), *(job for job in jobs if job.number in numbers)]
    return min(own, key=lambda job: job.state == "PENDING", default=None)


def _rows(file: Path) -> list[Row]:
    """The newest rows; a torn last line, and the first one where the tail begins, are left out."""
    if not file.is_file():
        return []
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - TAIL_BYTES))
        return [row for row in map(_decoded, stream.read().splitlines()) if "step" in row]


def _json_lines(file: Path) -> list[dict[str, Any]]:
    lines = file.read_bytes().splitlines() if file.is_file() else []
    return [row for row in map(_decoded, lines) if row]


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _slow_ranks(run: Path) -> list[str]:
    try:
        return [str(one["says"]) for one in json.loads((run / "slow_ranks.json").read_text())]
    except (OSError, ValueError):
        return []


def _training(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "seconds" in row]


def _newest(rows: Sequence[Row], key: str) -> float | None:
    return next((float(row[key]) for row in reversed(rows) if key in row), None)


def _losses(rows: Sequence[Row]) -> dict[str, float]:
    """Each learner's newest training loss, the teacher first."""
    found: dict[str, float] = {}
    for row in rows:
        for key, loss in row.items():
            if key.endswith("/loss") and not key.startswith("val/"):
                found[key.removesuffix("/loss").removeprefix("students/")] = float(loss)
    return dict(sorted(found.items(), key=lambda item: (item[0] != "teacher", item[0])))


def _seconds_left(rows: Sequence[Row], steps: int) -> float | None:
    recent = _training(rows)[-USUAL_ROWS:]
    made = recent[-1]["step"] - recent[0]["step"] if recent else 0
    if made <= 0:
        return None
    pace = (recent[-1]["seconds"] - recent[0]["seconds"]) / made
    return float(pace * max(0, steps - recent[-1]["step"]))


def _checkpoint(run: Path) -> tuple[int | None, float | None]:
    folders = [path for path in run.glob("checkpoints/step-*") if path.name[5:].isdigit()]
    if not folders:
        return None, None
    newest = max(folders, key=lambda path: int(path.name[5:]))
    return int(newest.name[5:]), time.time() - newest.stat().st_mtime


def _log(run: Path) -> str | None:
    logs = [*run.glob("logs/rank-000.log"), *run.glob("logs/slurm-*.log")]
    if not logs:
        return None
    return str(max(logs, key=lambda path: path.stat().st_mtime))
