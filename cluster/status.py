"""The status of a run, read from its folder and from SLURM, without contacting the job.

A run outside SLURM is judged by its folder alone: the newest attempt's record names rank 0's
process, and the age of ``metrics.jsonl`` tells a live run from a stalled one.
"""

import dataclasses
import glob
import itertools
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import configs
from cluster import run_files
from cluster.errors import LaunchError
from cluster.run_files import Row
from cluster.run_state import Evidence, last_step, state_of, training_rows
from cluster.scheduler import QueuedJob, of_run, recorded_ends, words
from configs.progress import counted, duration, seconds_left
from configs.runs import USUAL_ROWS, has_begun, has_ended, remarks_in
from configs.strict_json import strict_json

SEED = re.compile(r"[0-9]{1,19}")

EndStates = Mapping[str, str]  # SLURM_JOB_ID -> final state, from SLURM's accounting


@dataclass(frozen=True)
class RunStatus:
    """The status of one run. Unknown values are None."""

    name: str
    state: str  # new, queued, running, stalled, stopped, failed, finished, unreadable
    reason: str = ""  # why it is in that state
    step: int = 0
    steps: int | None = 0
    finished_runs: int | None = None  # of a suite
    losses: dict[str, float] = field(default_factory=dict)  # learner -> newest loss
    masked_losses: dict[str, float] = field(default_factory=dict)  # its part that can be compared
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    checkpoint: int | None = None  # the newest one's step
    checkpoint_age: float | None = None  # seconds
    attempts: int = 0
    restarts: list[str] = field(default_factory=list)  # why each earlier SLURM attempt ended
    job: str | None = None  # SLURM's id, while it is queued or runs
    log: str | None = None  # the file to open
    slow_ranks: list[str] = field(default_factory=list)  # a line for each straggler
    setbacks: list[str] = field(default_factory=list)  # a line for each student with one
    alerts: list[str] = field(default_factory=list)  # the newest ones
    damaged: list[str] = field(default_factory=list)  # a line for each damaged file


def read_runs(root: Path, jobs: Sequence[QueuedJob] | None) -> list[RunStatus]:
    """Every run below `root` (the ``runs`` folder), by name.

    `jobs` is SLURM's queue, or None where it cannot be read. A folder that cannot be read becomes
    an ``unreadable`` row.
    """
    begun = {*filter(has_begun, root.glob("*"))}
    waiting = {path.parents[2] for path in root.glob("*/submissions/*/*.yaml")} - begun
    shown = begun | {run for run in waiting if not is_array(run) or _is_row(run)}
    return _rows([run for run in shown if not run.name.startswith(".")], jobs)


def read_array(run: Path, jobs: Sequence[QueuedJob] | None) -> list[RunStatus]:
    """The runs of the seed array that was submitted as `run`, and the seeds that have not begun."""
    seeds = {*filter(has_begun, run.parent.glob(f"{glob.escape(run.name)}-seed*"))}
    return _rows(seeds | {run} if _is_row(run) else seeds, jobs)


def read_one(run: Path, jobs: Sequence[QueuedJob] | None) -> RunStatus:
    """The run in a folder. Raises LaunchError where there is no run."""
    return read_run(run, jobs, recorded_ends(_unexplained([run], jobs)))


def is_array(run: Path) -> bool:
    """Whether `run` is only the name under which a seed array was submitted."""
    return not has_begun(run) and any(run.glob("submissions/*/seeds"))


def _is_row(array: Path) -> bool:
    """Whether an array is shown beside its runs: seeds are to come, or which ones is unknown."""
    try:
        return bool(_seeds_to_come(array))
    except (LaunchError, OSError):
        return True  # its row says why


def _seeds_to_come(array: Path) -> dict[str, str]:
    """Array index -> seed, for the seeds of the newest submission whose run has not begun.

    Raises LaunchError where the list of seeds is damaged.
    """
    newest = max(array.glob("submissions/*/seeds"))
    seeds = words(newest)
    if not all(SEED.fullmatch(seed) for seed in seeds):
        raise LaunchError(f"{newest}: damaged: not a list of seeds; submit the array again")
    runs = [array.with_name(f"{array.name}-seed{seed}") for seed in seeds]
    return {
        str(index): seed
        for index, (seed, run) in enumerate(zip(seeds, runs, strict=True))
        if not has_begun(run)
    }


def _rows(runs: Collection[Path], jobs: Sequence[QueuedJob] | None) -> list[RunStatus]:
    ends = recorded_ends(_unexplained(runs, jobs))
    return [_row(run, jobs, ends) for run in sorted(runs)]


def _row(run: Path, jobs: Sequence[QueuedJob] | None, ends: EndStates) -> RunStatus:
    try:
        return read_run(run, jobs, ends)
    except (LaunchError, OSError) as error:
        return RunStatus(run.name, "unreadable", " ".join(str(error).split()))


def read_run(
    run: Path, jobs: Sequence[QueuedJob] | None, ends: EndStates | None = None
) -> RunStatus:
    """The run in a folder, given SLURM's queue (None where it cannot be read) and accounting.

    Raises LaunchError where there is no run.
    """
    config = _config(run)
    steps, hours = config.get("steps"), _number(config.get("hours"))
    rows = run_files.newest_rows(run / "metrics.jsonl")
    known = _evidence(run, jobs, ends or {}, rows)
    job = known.job
    checkpoint, age = run_files.newest_checkpoint(run)
    results = run_files.json_object(run / "evaluation.json")
    if run_files.trains(run):
        is_finished = steps is not None and has_ended(results, steps, hours)
    else:
        is_finished = known.last_event == "done" and known.left_unstarted is None
    state, reason = state_of(known, is_finished)
    return RunStatus(
        name=run.resolve().name,
        state=state,
        reason=reason,
        step=max(last_step(rows), checkpoint or 0),
        steps=steps,
        finished_runs=run_files.finished_runs(run),
        losses=_losses(rows, "loss", config.get("students")),
        masked_losses=_losses(rows, "mlm", config.get("students")),
        tokens_per_second=_newest(rows, "tokens_per_second") if state == "running" else None,
        seconds_left=_seconds_left(rows, steps, hours) if state == "running" else None,
        checkpoint=checkpoint,
        checkpoint_age=age,
        attempts=_starts(run, known.events),
        restarts=_restarts(known.events, waits=state in ("queued", "running", "stalled")),
        job=job.id if job else None,
        log=run_files.newest_log(run),
        slow_ranks=remarks_in(run / "slow_ranks.json") if state == "running" else [],
        setbacks=remarks_in(run / "setbacks.json"),
        alerts=run_files.alerts_of(run)[-3:],
        damaged=run_files.damaged_files(run),
    )


def _evidence(
    run: Path, jobs: Sequence[QueuedJob] | None, ends: EndStates, rows: Sequence[Row]
) -> Evidence:
    record, touched = run_files.newest_attempt(run)
    return Evidence(
        run,
        rows,
        run_files.events_of(run),
        record,
        touched,
        _jobs_to_come(run, jobs) if is_array(run) else _own_view(run, jobs),
        ends,
    )


def _own_view(run: Path, jobs: Sequence[QueuedJob] | None) -> Sequence[QueuedJob] | None:
    """The queue, or None for another user's run: the queue lists only this user's jobs."""
    return jobs if run.exists() and run.stat().st_uid == os.getuid() else None


def _jobs_to_come(array: Path, jobs: Sequence[QueuedJob] | None) -> list[QueuedJob] | None:
    """The tasks of an array that are pending, or whose run has not begun."""
    indices = _seeds_to_come(array)
    of_array = of_run(jobs or [], array)
    coming = [job for job in of_array if job.state == "PENDING" or job.index in indices]
    return None if jobs is None else coming


def _unexplained(runs: Iterable[Path], jobs: Sequence[QueuedJob] | None) -> list[str]:
    """The last job of each run without results and without a job in the queue."""
    last = (_unexplained_job(run, jobs) for run in runs)
    return [job for job in last if job]


def _unexplained_job(run: Path, jobs: Sequence[QueuedJob] | None) -> str | None:
    if (run / "evaluation.json").exists():
        return None
    try:
        known = _evidence(run, jobs, {}, ())  # a job is known without the rows
        return known.last_job if known.job is None else None
    except (LaunchError, OSError):  # its row says why
        return None


def to_json(runs: Sequence[RunStatus]) -> str:
    """The runs as a JSON list; a loss that is not finite is null."""
    return strict_json([dataclasses.asdict(run) for run in runs])


def _config(run: Path) -> dict[str, Any]:
    """The run's config, or the config that was submitted last; it has ``steps``.

    It is unknown (empty) until the first start of a run has accepted its config.
    """
    if not run_files.trains(run):
        return {}
    array = run.resolve().with_name(re.sub(r"-seed\d+$", "", run.resolve().name))
    submitted = [*run.glob("submissions/*/config.yaml"), *array.glob("submissions/*/config.yaml")]
    files = [run / "config.yaml", *sorted(submitted, reverse=True)]
    file = next((file for file in files if file.is_file()), None)
    if file is None and has_begun(run):
        return {}
    if file is None:
        raise LaunchError(f"{run}: not a run: no job has begun in it")
    try:
        config = configs.plain(file.read_text(encoding="utf-8"), str(file))
    except UnicodeDecodeError as error:
        raise LaunchError(f"{file}: not valid UTF-8 at byte {error.start}") from error
    except configs.ConfigError as error:
        raise LaunchError(str(error)) from error
    if not isinstance(config.get("steps"), int):
        raise LaunchError(f"{file}: not the config of a run: it has no steps")
    return config


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _starts(run: Path, events: Sequence[dict[str, Any]]) -> int:
    """How often it has started: by a run's own records, by SLURM's of what trains nothing."""
    if run_files.trains(run):
        return len(list(run.glob("attempts/*.json")))
    return sum(event["event"] == "start" for event in events)


def _restarts(events: Sequence[dict[str, Any]], waits: bool) -> list[str]:
    """Why each attempt that another one followed ended; `waits`: whether the last one's will."""
    reasons = [
        _reason_before(before, after)
        for before, after in itertools.pairwise(events)
        if after["event"] == "start"
    ]
    follows = waits and events[-1:] and events[-1]["event"] in ("requeue", "left")
    return [*reasons, *([str(events[-1]["reason"])] if follows else [])]


def _reason_before(event: Mapping[str, Any], start: Mapping[str, Any]) -> str:
    """Why the attempt with this last event ended before the next one's start.

    What it recorded when SLURM ended it is less than what the next start shows: that of the same
    job was SLURM's doing, and the job was not cancelled.
    """
    same_job = event.get("job") == start.get("job")
    if same_job and event["event"] in ("start", "ended"):
        return "preempted, or its node failed: SLURM requeued it"
    if event["event"] == "start":
        return "its job ended without a record, and the run was submitted again"
    return str(event["reason"])


def _newest(rows: Sequence[Row], key: str) -> float | None:
    return next((float(row[key]) for row in reversed(rows) if key in row), None)


def _losses(rows: Sequence[Row], of: str, students: object) -> dict[str, float]:
    """The newest training loss of each learner, or a term of it, the teacher first.

    A run whose config has no longer all `students` that it began with has rows of the others.
    """
    newest: dict[str, float] = {}
    for row in rows:
        for key, loss in row.items():
            if key.endswith(f"/{of}") and not key.startswith("val/"):
                learner = key.removesuffix(f"/{of}")
                name = learner.removeprefix("students/")
                if name == learner or not isinstance(students, Mapping) or name in students:
                    newest[name] = float(loss)
    return dict(sorted(newest.items(), key=lambda item: (item[0] != "teacher", item[0])))


def _seconds_left(rows: Sequence[Row], steps: int | None, hours: float | None) -> float | None:
    """At the speed of the newest rows; None before the second, or where the steps are unknown."""
    recent = training_rows(rows)[-USUAL_ROWS:]
    made = recent[-1]["step"] - recent[0]["step"] if recent else 0
    if made <= 0 or steps is None:
        return None
    seconds = recent[-1]["seconds"]
    pace = (seconds - recent[0]["seconds"]) / made
    return seconds_left(recent[-1]["step"], steps, pace, seconds, hours)


COLOURS = {
    "running": "green",
    "finished": "green",
    "stalled": "yellow",
    "failed": "red",
    "unreadable": "red",
}


def table(runs: Sequence[RunStatus]) -> RenderableType:
    """One row per run, and below the table a line for everything that needs attention."""
    grid = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    # On a narrow terminal, names are folded, steps and ages wrapped; numbers stay whole.
    grid.add_column("run", overflow="fold", min_width=8)
    grid.add_column("state", no_wrap=True)
    grid.add_column("step", min_width=10)
    grid.add_column("loss", overflow="fold", min_width=8)
    grid.add_column("tokens/s", no_wrap=True, justify="right")
    grid.add_column("left", no_wrap=True, justify="right")
    grid.add_column("saved", min_width=10)
    grid.add_column("starts", no_wrap=True, justify="right", min_width=6)
    for run in runs:
        grid.add_row(
            Text(run.name),
            Text(run.state, style=COLOURS.get(run.state, "")),
            _progress(run),
            Text("\n".join(_loss(run, learner) for learner in run.losses)),
            "" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
            "" if run.seconds_left is None else duration(run.seconds_left),
            _checkpoint(run),
            str(run.attempts),
        )
    return Group(grid, *(Text(line) for run in runs for line in _remarks(run)))


def _progress(run: RunStatus) -> str:
    if run.finished_runs is not None:
        return counted(run.finished_runs, "run")
    return f"{run.step:,} of {'?' if run.steps is None else f'{run.steps:,}'}"


def _loss(run: RunStatus, learner: str) -> str:
    """The loss of a learner that compares with others': of masked words, where it learns them."""
    loss, masked = run.losses[learner], run.masked_losses.get(learner)
    if masked is None:
        others = run.masked_losses.keys() - {learner}
        return f"{learner} {loss:.3f}{' (no mlm)' if others else ''}"
    return f"{learner} {masked:.3f}{' (mlm)' if masked != loss else ''}"


def _checkpoint(run: RunStatus) -> str:
    if run.checkpoint is None or run.checkpoint_age is None:
        return ""
    return f"{run.checkpoint:,}, {duration(run.checkpoint_age)} ago"


def _remarks(run: RunStatus) -> list[str]:
    remarks = []
    if run.reason:
        verb = run.state if run.state in ("failed", "finished") else f"is {run.state}"
        remarks.append(f"{run.name} {verb}: {run.reason}")
    if run.restarts:
        remarks.append(f"{run.name} was restarted: {_counted(run.restarts)}")
    remarks += [f"{run.name}: {line}" for line in (*run.slow_ranks, *run.setbacks, *run.damaged)]
    if run.alerts and run.state in ("running", "stalled", "failed"):
        remarks.append(f"{run.name} alerted: {'; '.join(run.alerts)}")
    if run.log and run.state in ("running", "stalled", "failed"):
        remarks.append(f"{run.name} logs to {run.log}")
    return remarks


def _counted(reasons: Sequence[str]) -> str:
    """The reasons, once each, with their counts: "the time limit (8 times); preempted"."""
    counts = Counter(reason or "no reason given" for reason in reasons)
    return "; ".join(
        reason if count == 1 else f"{reason} ({count} times)" for reason, count in counts.items()
    )
