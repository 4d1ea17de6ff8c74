"""Weights & Biases: the tracker of every run, unless ``log.wandb`` turns it off.

W&B cannot resume an offline run. So every offline start writes the whole file into a new folder,
and removes the older, shorter folders of the same run: the one to upload is complete. Online, a
start sends only what W&B does not have yet.

A run that rolled back repeats steps, of which W&B keeps the first values until `tandem sync`. Its
`resume_from`, which could cut them off, is a preview that self-hosted servers lack, is not for runs
whose axes `define_metric` sets, and is not for offline runs.
"""

import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Before wandb is imported: it must not send crash reports to a third party.
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

import wandb

from configs.durable import atomic_write
from configs.runs import USUAL_ROWS, revision_in, seconds_since, stall_timeout
from configs.strict_json import parse_json
from trainer.tracking.trackers import Row, Tail, Tracker, register_tracker

CRASH_LOOP = 3  # attempts in a row without a new step


class Alerts:
    """Sends alerts, and writes each to ``alerts.jsonl``."""

    def __init__(
        self,
        send: Callable[[str, str], object],
        folder: Path,
        rollbacks: float = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`send` takes a title and a text.

        Args:
            rollbacks: how many have been reported already.
            clock: returns seconds.
        """
        self._send, self._folder = send, folder
        self._intervals: list[float] = []
        self._clock, self._last = clock, clock()
        self._is_stalled = False
        self._rollbacks = rollbacks

    def add_row(self, row: Row) -> None:
        """Take note of a row that has just been logged."""
        now = self._clock()
        self._intervals = [*self._intervals[-USUAL_ROWS + 1 :], now - self._last]
        self._last, self._is_stalled = now, False
        if row.get("rollbacks", 0.0) > self._rollbacks:
            self._rollbacks = row["rollbacks"]
            self._alert("spike", f"rolled back after a spike; resumed at step {row['step']:,.0f}")

    def check_stall(self) -> None:
        """Send an alert, once, when the run has made no progress for too long."""
        usual = statistics.fmean(self._intervals) if self._intervals else None
        quiet = min(self._clock() - self._last, seconds_since(self._folder / "metrics.jsonl"))
        if not self._is_stalled and quiet > stall_timeout(usual):
            self._is_stalled = True
            self._alert("stalled", f"no progress for {quiet / 60:.0f} minutes")

    def check_crash_loop(self, newest_step: float) -> None:
        """Count starts in a row without a new step; send an alert at `CRASH_LOOP` of them."""
        file = self._folder / "wandb" / "attempts.json"
        best, unproductive = _starts_so_far(file)
        unproductive = 0 if newest_step > best else unproductive + 1
        atomic_write(file, json.dumps([max(best, newest_step), unproductive]))
        if unproductive == CRASH_LOOP:
            text = f"{unproductive} attempts in a row made no step beyond {best:,.0f}"
            self._alert("crash loop", text)

    def _alert(self, title: str, text: str) -> None:
        with (self._folder / "alerts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "title": title, "text": text}) + "\n")
        self._send(title, f"{self._folder.name}: {text}")


def _starts_so_far(file: Path) -> tuple[float, int]:
    """The furthest step, and the starts in a row without a new one; a damaged file says nothing."""
    try:
        best, unproductive = parse_json(file.read_bytes())
        return float(best), int(unproductive)
    except (FileNotFoundError, ValueError, TypeError, OverflowError):
        return -1.0, 0


INIT_SECONDS = 60.0


@register_tracker("wandb")
class WandbTracker(Tracker):
    """A run of W&B, which has each step once. Also sends alerts."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        *,
        mode: str,
        about: Mapping[str, Any],
        run_id: str,
        models: Sequence[Mapping[str, Any]],
        verify: bool,
    ) -> None:
        """Open the W&B run; `tracking.start` describes the arguments."""
        # Tables wait there to be uploaded: a home may be read-only, or another one on a login node.
        os.environ.setdefault("WANDB_DATA_DIR", str(folder / "wandb"))
        revision = revision_in((folder / "config.yaml").read_text(encoding="utf-8"))
        known = {
            **{"dir": folder, "id": run_id, "name": folder.name, **about},
            "config": {**config, **({"git_revision": revision} if revision else {})},
        }
        run = self._run = _open(known, mode, verify)
        self._folder, self._newest = folder, run.starting_step - 1
        self._first = _models_table(models)  # what goes with the first row
        _define_axes(run)
        rows = Tail(folder / "metrics.jsonl").rows()
        told = [(row["step"], row.get("rollbacks", 0.0)) for row in rows]  # not each whole row
        rollbacks = max((count for _, count in told), default=0.0)
        self._alerts = Alerts(
            lambda title, text: run.alert(title=title, text=text, level="WARN"), folder, rollbacks
        )
        if not verify:
            self._alerts.check_crash_loop(max((step for step, _ in told), default=0.0))

    def log(self, row: Row) -> None:
        self._alerts.add_row(row)
        step = int(row["step"])
        if step >= max(self._newest, self._run.starting_step):
            self._run.log({**row, **self._first}, step=step)
            self._newest, self._first = step, {}

    def check(self) -> None:
        self._alerts.check_stall()

    def preempt(self) -> None:
        self._run.mark_preempting()

    def close(self, completed: bool) -> None:
        if completed:
            _log_results(self._run, self._folder, self._newest)
        self._run.finish(exit_code=0 if completed else 1)


def _open(known: dict[str, Any], mode: str, verify: bool) -> Any:
    """Open the W&B run: online if `mode` and the connection allow it, else offline.

    `known` are arguments of ``wandb.init``.
    """
    if mode == "auto":
        try:
            if wandb.login(verify=False, prompt=False):
                run = wandb.init(resume="allow", settings=_settings(), **known)
                return _rewritten(run, known) if verify else run
        except (wandb.Error, ValueError) as error:
            print(f"Weights & Biases cannot be reached, continuing offline: {error}", flush=True)
            wandb.teardown()
    shutil.rmtree(known["dir"] / "wandb" / "artifacts", ignore_errors=True)  # of older starts
    run = wandb.init(mode="offline", settings=_settings(), **known)
    for older in (known["dir"] / "wandb").glob(f"offline-run-*-{known['id']}"):
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


def _define_axes(run: Any) -> None:
    """Use steps as the x axis, and tokens for held-out metrics. Every row has both."""
    run.define_metric("step")
    run.define_metric("tokens")
    run.define_metric("*", step_metric="step")
    run.define_metric("val/*", step_metric="tokens")


def _models_table(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The table of the learners' models; empty if there are none."""
    if not models:
        return {}
    rows = [[*row.values()] for row in models]
    return {"models": wandb.Table(columns=list(models[0]), data=rows)}


def _log_results(run: Any, folder: Path, step: int) -> None:
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
        table.add_data(name, *facts.values())
        known = {column: value for column, value in facts.items() if value is not None}
        run.summary.update({f"final/{name}/{column}": known[column] for column in known})
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


def _settings() -> wandb.Settings:
    return wandb.Settings(
        console="off",
        init_timeout=INIT_SECONDS,
        save_code=False,
        x_save_requirements=False,
        x_stats_pid=os.getppid(),  # the trainer's memory and processor time, not this process's
    )
