"""What a run is doing, read from its folder and from SLURM's queue; nothing is asked of the job.

The folder alone answers for a run that no scheduler started: the newest attempt's record names its
first process, and the age of ``metrics.jsonl`` tells a live run from a stalled one.
"""

from __future__ import annotations

import dataclasses
import itertools
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cluster.errors import LaunchError
from cluster.run_files import (
    Row,
    alerts_of,
    events_of,
    json_object,
    newest_checkpoint,
    newest_log,
    newest_rows,
    slow_ranks,
)
from cluster.slurm import QueuedJob, of_run
from configs.strict_json import strict_json

STALLED_AFTER = 300.0  # seconds without a row, or ten times the usual pause if that is longer
FIRST_ROW_AFTER = 1800.0  # seconds, which a start and the steps before the first row may take
SILENT_AFTER = 60.0  # seconds without a sign of life of a process on another machine
USUAL_ROWS = 10  # over which speed and the usual pause are measured


@dataclass(frozen=True)
class RunStatus:
    """One run. What is not known is None."""

    name: str
    state: str  # new, queued, running, stalled, stopped, failed, finished, unreadable
    reason: str = ""  # why it is in that state
    step: int = 0
    steps: int = 0
    losses: dict[str, float] = field(default_factory=dict)  # of each learner, the newest
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    checkpoint: int | None = None  # the newest one's step
    checkpoint_age: float | None = None  # seconds
    attempts: int = 0
    restarts: list[str] = field(default_factory=list)  # why each attempt on SLURM was not the last
    job: str | None = None  # SLURM's id, while it is queued or runs
    log: str | None = None  # the file to open
    slow_ranks: list[str] = field(default_factory=list)  # a line for each that holds up the others
    alerts: list[str] = field(default_factory=list)  # the newest ones


def read_runs(root: Path, jobs: Sequence[QueuedJob] | None) -> list[RunStatus]:
    """Every run below `root` (the ``runs`` folder), by name; `jobs` as for `read_run`.

    A folder that cannot be read is a row that says so: it must not hide the others.
    """
    begun = {path.parent for path in root.glob("*/config.yaml")}
    waiting = {path.parents[2] for path in root.glob("*/submissions/*/config.yaml")} - begun
    shown = begun | {run for run in waiting if not is_array(run) or _pending(run, jobs)}
    return [_row(run, jobs) for run in sorted(shown) if not run.name.startswith(".")]


def read_array(run: Path, jobs: Sequence[QueuedJob] | None) -> list[RunStatus]:
    """The runs of an array of seeds that was submitted as `run`, and what of it still waits."""
    seeds = {path.parent for path in run.parent.glob(f"{run.name}-seed*/config.yaml")}
    return [_row(one, jobs) for one in sorted(seeds | {run} if _pending(run, jobs) else seeds)]


def is_array(run: Path) -> bool:
    """Whether `run` is only the name under which an array of seeds was submitted."""
    return not (run / "config.yaml").exists() and any(run.glob("submissions/*/seeds"))


def _row(run: Path, jobs: Sequence[QueuedJob] | None) -> RunStatus:
    try:
        return read_run(run, _pending(run, jobs) if is_array(run) else jobs)
    except (LaunchError, OSError) as error:
        return RunStatus(run.name, "unreadable", " ".join(str(error).split()))


def _pending(run: Path, jobs: Sequence[QueuedJob] | None) -> list[QueuedJob]:
    return [job for job in of_run(jobs or [], run) if job.state == "PENDING"]


def read_run(run: Path, jobs: Sequence[QueuedJob] | None) -> RunStatus:
    """The run in a folder, given SLURM's queue, or None where that cannot be read.

    Raises LaunchError where there is no run.
    """
    steps, hours = _budget(run)
    rows = newest_rows(run / "metrics.jsonl")
    events = events_of(run)
    job = _job(run, events, jobs or [])
    checkpoint, age = newest_checkpoint(run)
    attempts = len(list(run.glob("attempts/*.json")))
    if _finished(run, rows, steps, hours):
        state, reason = "finished", ""
    elif job and job.state == "PENDING":
        state, reason = "queued", job.reason
    elif job or _process_lives(run) or (jobs is None and _started(events)):
        state, reason = _live_state(run, rows)
    else:
        state, reason = _ended_state(rows, events, checkpoint, attempts)
    return RunStatus(
        name=run.resolve().name,
        state=state,
        reason=reason,
        step=rows[-1]["step"] if rows else 0,
        steps=steps,
        losses=_losses(rows),
        tokens_per_second=_newest(rows, "tokens_per_second") if state == "running" else None,
        seconds_left=_seconds_left(rows, steps) if state == "running" else None,
        checkpoint=checkpoint,
        checkpoint_age=age,
        attempts=attempts,
        restarts=_restarts(events),
        job=job.id if job else None,
        log=newest_log(run),
        slow_ranks=slow_ranks(run) if state == "running" else [],
        alerts=alerts_of(run)[-3:],
    )


def to_json(runs: Sequence[RunStatus]) -> str:
    """The runs as a JSON list; a loss that is not finite is null."""
    return strict_json([dataclasses.asdict(run) for run in runs])


def _budget(run: Path) -> tuple[int, float | None]:
    """Steps and hours of the run's config, or of the one that was submitted last."""
    files = [run / "config.yaml", *sorted(run.glob("submissions/*/config.yaml"), reverse=True)]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise LaunchError(f"{run}: no run there (it has no config.yaml)")
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LaunchError(f"{file}: not valid YAML: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("steps"), int):
        raise LaunchError(f"{file}: not the config of a run, which has steps")
    return config["steps"], config.get("hours")


def _live_state(run: Path, rows: Sequence[Row]) -> tuple[str, str]:
    quiet = _quiet_too_long(run, rows)
    if quiet is None:
        return "running", ""
    return "stalled", f"no step for {quiet / 60:.0f} minutes"


def _ended_state(
    rows: Sequence[Row], events: Sequence[dict[str, Any]], checkpoint: int | None, attempts: int
) -> tuple[str, str]:
    if events and not _started(events):
        failed = events[-1]["event"] == "final" and events[-1].get("code") != 75
        return "failed" if failed else "stopped", str(events[-1]["reason"])
    if not rows and not events:
        return ("failed", "it ended before its first row") if attempts else ("new", "")
    if checkpoint is not None and rows and checkpoint >= rows[-1]["step"]:
        return "stopped", ""
    return "failed", "it ended without saving; started again it goes on from its last checkpoint"


def _started(events: Sequence[dict[str, Any]]) -> bool:
    return bool(events) and events[-1]["event"] == "start"


def _restarts(events: Sequence[dict[str, Any]]) -> list[str]:
    """Why each attempt but the last ended. One that left no word was taken away with its node."""
    reasons = [
        "its node failed, or SLURM requeued it" if before["event"] == "start" else before["reason"]
        for before, after in itertools.pairwise(events)
        if after["event"] == "start"
    ]
    waits = events[-1:] and events[-1]["event"] in ("requeue", "left")
    return [str(reason) for reason in [*reasons, *([events[-1]["reason"]] if waits else [])]]


def _finished(run: Path, rows: Sequence[Row], steps: int, hours: float | None) -> bool:
    """Whether there are results of its last step; with `hours` that may come before `steps`."""
    step = json_object(run / "evaluation.json").get("step")
    if not isinstance(step, int):
        return False
    return step >= steps or (hours is not None and (not rows or step >= rows[-1]["step"]))


def _process_lives(run: Path) -> bool:
    """Whether the newest attempt's first process is alive, as far as this machine can tell.

    One on another machine touches its record every few seconds.
    """
    records = sorted(run.glob("attempts/*.json"))
    record = json_object(records[-1]) if records else {}
    if not {"host", "process", "time"} <= record.keys() or record.get("ended"):
        return False
    try:
        if record["host"] != socket.gethostname():
            return time.time() - records[-1].stat().st_mtime < SILENT_AFTER
        started = Path(f"/proc/{record['process']}").stat().st_mtime
    except OSError:
        return False
    return bool(started <= record["time"] + 1)


def _quiet_too_long(run: Path, rows: Sequence[Row]) -> float | None:
    """Seconds since the last sign of progress, where that is too long.

    The attempt's record is no such sign: its heart beats on beside a rank that hangs.
    """
    signs = [run / name for name in ("metrics.jsonl", "config.yaml", "slurm.jsonl")]
    newest = max((file.stat().st_mtime for file in signs if file.exists()), default=time.time())
    quiet = time.time() - newest
    return quiet if quiet > _patience(_training(rows)[-USUAL_ROWS:]) else None


def _patience(recent: Sequence[Row]) -> float:
    """Seconds without a row that are nothing unusual, after the `recent` ones."""
    if not recent:
        return FIRST_ROW_AFTER
    before = recent[0]["seconds"] if len(recent) > 1 else 0.0
    usual = (recent[-1]["seconds"] - before) / max(1, len(recent) - 1)
    return float(max(STALLED_AFTER, 10 * usual))


def _job(
    run: Path, events: Sequence[dict[str, Any]], jobs: Sequence[QueuedJob]
) -> QueuedJob | None:
    """The job of this run that SLURM has, the running one first."""
    numbers = {event.get("job") for event in events}
    own = [*of_run(jobs, run), *(job for job in jobs if job.number in numbers)]
    return min(own, key=lambda job: job.state == "PENDING", default=None)


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
