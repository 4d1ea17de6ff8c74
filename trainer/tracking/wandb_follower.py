"""The process that copies a run's files to Weights & Biases (`trainer.tracking.tracking`).

It takes one argument, a JSON object (`Options`). It ends at the end of standard input: after the
line "completed" or "stopped", or without either when the trainer was killed.

W&B cannot resume an offline run. So every offline start writes the whole file into a new folder,
and removes the older, shorter folders of the same run: the one to upload is complete. Online, a
start sends only what W&B does not have yet.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before wandb is imported: it must not send crash reports to a third party.
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

import wandb

import configs
from configs.runs import USUAL_ROWS, revision_in, seconds_since, stall_timeout
from configs.strict_json import parse_json
from trainer.durable import atomic_write
from trainer.tracking.trackers import LastWord, Row, Tail

POLL_SECONDS = 1.0
INIT_SECONDS = 60.0
CRASH_LOOP = 3  # attempts in a row without a new step


@dataclass(frozen=True)
class Options:
    """The run to follow, and as which W&B run; `tracking.start` describes the fields."""

    folder: str
    mode: str
    about: dict[str, Any]
    id: str
    models: list[dict[str, Any]] = field(default_factory=list)
    verify: bool = False


class Alerts:
    """Sends alerts: a line in ``alerts.jsonl``, and an alert of W&B."""

    def __init__(
        self,
        run: Any,
        folder: Path,
        rollbacks: float = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rollbacks`: how many have been reported already. `clock` returns seconds."""
        self._run, self._folder = run, folder
        self._intervals: list[float] = []
        self._clock, self._last = clock, clock()
        self._is_stalled = False
        self._rollbacks = rollbacks

    def send(self, title: str, text: str) -> None:
        """Record an alert, and let W&B send it."""
        with (self._folder / "alerts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "title": title, "text": text}) + "\n")
        self._run.alert(title=title, text=f"{self._folder.name}: {text}", level="WARN")

    def add_row(self, row: Row) -> None:
        """Take note of a row that has just been logged."""
        now = self._clock()
        self._intervals = [*self._intervals[-USUAL_ROWS + 1 :], now - self._last]
        self._last, self._is_stalled = now, False
        if row.get("rollbacks", 0.0) > self._rollbacks:
            self._rollbacks = row["rollbacks"]
            self.send("spike", f"rolled back after a spike; resumed at step {row['step']:,.0f}")

    def check_stall(self) -> None:
        """Send an alert, once, when the run has made no progress for too long."""
        usual = statistics.fmean(self._intervals) if self._intervals else None
        quiet = min(self._clock() - self._last, seconds_since(self._folder / "metrics.jsonl"))
        if not self._is_stalled and quiet > stall_timeout(usual):
            self._is_stalled = True
            self.send("stalled", f"no progress for {quiet / 60:.0f} minutes")

    def check_crash_loop(self, newest_step: float) -> None:
        """Count starts in a row without a new step; send an alert at `CRASH_LOOP` of them."""
        file = self._folder / "wandb" / "attempts.json"
        best, unproductive = _starts_so_far(file)
        unproductive = 0 if newest_step > best else unproductive + 1
        atomic_write(file, json.dumps([max(best, newest_step), unproductive]))
        if unproductive == CRASH_LOOP:
            self.send(
                "crash loop", f"{unproductive} attempts in a row made no step beyond {best:,.0f}"
            )


def _starts_so_far(file: Path) -> tuple[float, int]:
    """The furthest step, and the starts in a row without a new one; a damaged file says nothing."""
    try:
        best, unproductive = parse_json(file.read_bytes())
        return float(best), int(unproductive)
    except (FileNotFoundError, ValueError, TypeError, OverflowError):
        return -1.0, 0


def follow(
    run: Any,
    rows: Callable[[], Iterator[Row]],
    ended: threading.Event,
    alerts: Alerts,
    first: dict[str, Any],
) -> int:
    """Log `rows` until `ended`, each at its step; rows that W&B already has are left out.

    `first` is logged with the first row. Returns the last step that W&B has.
    """
    newest = run.starting_step - 1
    last_look = False
    while not last_look:
        last_look = ended.wait(POLL_SECONDS)
        for row in rows():
            step = int(row["step"])
            alerts.add_row(row)
            if step >= max(newest, run.starting_step):
                run.log({**row, **first}, step=step)
                newest, first = step, {}
        if not last_look:
            alerts.check_stall()
    return newest


def open_run(options: Options) -> Any:
    """Open the W&B run: online if `mode` and the connection allow it, else offline."""
    folder = Path(options.folder)
    known: dict[str, Any] = {
        "dir": folder,
        "id": options.id,
        "name": folder.name,
        "config": _config(folder / "config.yaml"),
        **options.about,
    }
    if options.mode == "auto":
        try:
            if wandb.login(verify=False, prompt=False):
                run = wandb.init(resume="allow", settings=_settings(), **known)
                return _rewritten(run, known) if options.verify else run
        except (wandb.Error, ValueError) as error:
            print(f"Weights & Biases cannot be reached, continuing offline: {error}", flush=True)
            wandb.teardown()
    run = wandb.init(mode="offline", settings=_settings(), **known)
    for older in (folder / "wandb").glob(f"offline-run-*-{options.id}"):
        if older != Path(run.dir).parent:
            shutil.rmtree(older, ignore_errors=True)
    return run


def is_prefix(theirs: Sequence[Row], ours: Sequence[Row]) -> bool:
    """Whether W&B's rows are the first of our rows: none missing, none twice, no other values."""
    return len(theirs) <= len(ours) and all(
        row["_step"] == step["step"] and all(_same(row.get(key), step[key]) for key in step)
        for row, step in zip(theirs, ours, strict=False)
    )


def _same(theirs: float | str | None, ours: float) -> bool:
    return theirs is not None and (float(theirs) == ours or math.isnan(ours))


def by_step(rows: Iterable[Row]) -> list[Row]:
    """Merge the rows of each step into one, as W&B does; ascending."""
    steps: dict[float, Row] = {}
    for row in rows:
        steps.setdefault(row["step"], {}).update(row)
    return [steps[step] for step in sorted(steps)]


def _rewritten(run: Any, known: dict[str, Any]) -> Any:
    """The run itself, or a new one in its place if W&B's copy has gaps or other rows.

    W&B accepts no step before its last one, so a wrong copy cannot be repaired. ``wandb/id`` stores
    the new id, which the run uses from then on.
    """
    if not run.resumed:
        return run
    folder = known["dir"]
    theirs = list(wandb.Api().run(run.path).scan_history(use_cache=False))
    if is_prefix(theirs, by_step(Tail(folder / "metrics.jsonl").rows())):
        return run
    base, _, number = known["id"].partition("-")
    newer = f"{base}-{int(number or 1) + 1}"
    print(f"W&B's copy {known['id']} differs from metrics.jsonl; writing {newer}")
    run.tags = (*run.tags, "superseded")
    run.finish()
    atomic_write(folder / "wandb" / "id", newer)
    return wandb.init(resume="allow", settings=_settings(), **{**known, "id": newer})


def define_axes(run: Any) -> None:
    """Use steps as the x axis, and tokens for held-out metrics. Every row has both."""
    run.define_metric("step")
    run.define_metric("tokens")
    run.define_metric("*", step_metric="step")
    run.define_metric("val/*", step_metric="tokens")


def models_table(models: list[dict[str, Any]]) -> dict[str, Any]:
    """The table of the learners' models; empty if there are none."""
    if not models:
        return {}
    table = wandb.Table(columns=list(models[0]))
    for row in models:
        table.add_data(*row.values())
    return {"models": table}


def log_results(run: Any, folder: Path, step: int) -> None:
    """Log the held-out results, as a table and as summary values, and the report.

    They are added to the row of the last `step`, or, if W&B had that row before, to the summary.
    """
    try:
        results = parse_json((folder / "evaluation.json").read_bytes())
        scores = [str(column["name"]) for column in results["columns"]]
        columns = ["parameters", *scores, "retention", "tokens_per_second"]
        learners = {
            name: {column: _number(facts.get(column)) for column in columns}
            for name, facts in results["learners"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or a damaged one
        return
    table = wandb.Table(columns=["learner", *columns])
    for name, facts in learners.items():
        table.add_data(name, *(facts.get(column) for column in columns))
        known = [column for column in columns if facts.get(column) is not None]
        run.summary.update({f"final/{name}/{column}": facts[column] for column in known})
    media: dict[str, Any] = {"learners": table}
    report = folder / "report.html"
    if report.exists():
        media["report"] = wandb.Html(report.read_text(encoding="utf-8"), inject=False)
    if step >= run.starting_step:
        run.log(media, step=step)
    else:
        run.summary.update(media)


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None


def main(options: Options) -> None:
    """Follow the run until its trainer ends."""
    os.nice(10)  # training comes first
    last_word = LastWord()
    folder = Path(options.folder)
    run = open_run(options)
    define_axes(run)
    tail = Tail(folder / "metrics.jsonl")
    known = list(Tail(folder / "metrics.jsonl").rows())
    rollbacks = max((row.get("rollbacks", 0.0) for row in known), default=0.0)
    alerts = Alerts(run, folder, rollbacks)
    if not options.verify:
        alerts.check_crash_loop(max((row["step"] for row in known), default=0.0))
    step = follow(run, tail.rows, last_word.ended, alerts, models_table(options.models))
    if last_word.text == "completed":
        log_results(run, folder, step)
        run.finish(exit_code=0)
        return
    if last_word.text == "stopped":
        run.mark_preempting()
    run.finish(exit_code=1)


def _config(path: Path) -> dict[str, Any]:
    """The job's config, and the git revision in the first line of its file."""
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    config = configs.plain(text, str(path))
    if revision := revision_in(text):
        config["git_revision"] = revision
    return config


def _settings() -> wandb.Settings:
    return wandb.Settings(
        console="off",
        init_timeout=INIT_SECONDS,
        save_code=False,
        x_save_requirements=False,
        x_stats_pid=os.getppid(),  # the trainer's memory and processor time, not this process's
    )


if __name__ == "__main__":
    main(Options(**json.loads(sys.argv[1])))
