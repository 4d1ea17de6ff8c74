"""The process that copies a run's files to Weights & Biases; see `trainer.tracking.tracking`.

Takes one argument, a JSON object (`Options`). Ends when standard input does: after the line
"completed" or "stopped", or, without either, because the trainer is gone.

W&B cannot resume an offline run, so every start writes the whole file into a new offline folder and
removes the older, shorter ones of the same run: there is one folder to upload, and it is complete.
Online, a start sends what W&B has not yet.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before wandb is imported: no crash reports to a third party.
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

import wandb

import configs
from configs.strict_json import parse_json

POLL_SECONDS = 1.0
INIT_SECONDS = 60.0
USUAL_ROWS = 10  # over which the usual pause between rows is measured
BEFORE_FIRST_ROW = 6  # times as long as usual may pass while a run starts
FRUITLESS = 3  # attempts in a row that make a crash loop
REVISION = "# git revision: "

Row = dict[str, float]


@dataclass(frozen=True)
class Options:
    """What to follow: a run's `folder`, as the run `id` of a `project`.

    `mode` is auto (online with a key) or offline. `models` has a row for each learner, for a table.
    A run that logs nothing for `stalled_after` seconds, and ten usual pauses, has stalled. With
    `verify` W&B's own copy is read first.
    """

    folder: str
    mode: str
    project: str
    id: str
    models: list[dict[str, Any]] = field(default_factory=list)
    stalled_after: float = 300.0
    verify: bool = False


class Tail:
    """The rows of a ``metrics.jsonl`` that grows, each once and only when its line is whole.

    A file that was replaced (cut back) is read again from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0

    def rows(self) -> Iterator[Row]:
        """The rows since the last call."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                row = parse_json(line)
                yield {key: float(v) if isinstance(v, str) else v for key, v in row.items()}


class Alerts:
    """What somebody should know at once: a line in ``alerts.jsonl``, and W&B's own alert."""

    def __init__(
        self,
        run: Any,
        folder: Path,
        stalled_after: float,
        rollbacks: float = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`rollbacks` are known already. `clock` returns seconds."""
        self._run, self._folder, self._stalled_after = run, folder, stalled_after
        self._pauses: list[float] = []
        self._clock, self._last = clock, clock()
        self._is_stalled = False
        self._rollbacks = rollbacks

    def raise_one(self, title: str, text: str) -> None:
        """Record an alert and have W&B send it."""
        with (self._folder / "alerts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "title": title, "text": text}) + "\n")
        self._run.alert(title=title, text=f"{self._folder.name}: {text}", level="WARN")

    def saw(self, row: Row) -> None:
        """A row was logged now."""
        now = self._clock()
        self._pauses = [*self._pauses[-USUAL_ROWS + 1 :], now - self._last]
        self._last, self._is_stalled = now, False
        if row.get("rollbacks", 0.0) > self._rollbacks:
            self._rollbacks = row["rollbacks"]
            self.raise_one("spike", f"rolled back after a spike; going on from {row['step']:,.0f}")

    def look(self) -> None:
        """Notice when nothing has been logged for too long."""
        usual = sum(self._pauses) / max(1, len(self._pauses))
        patience = max(self._stalled_after * (1 if self._pauses else BEFORE_FIRST_ROW), 10 * usual)
        quiet = self._clock() - self._last
        if not self._is_stalled and quiet > patience:
            self._is_stalled = True
            self.raise_one("stalled", f"no step was logged for {quiet / 60:.0f} minutes")

    def notice_crash_loop(self, newest_step: float) -> None:
        """Count this attempt as fruitless unless some attempt before it made new steps."""
        file = self._folder / "wandb" / "attempts.json"
        best, fruitless = json.loads(file.read_text()) if file.exists() else (-1.0, 0)
        fruitless = 0 if newest_step > best else fruitless + 1
        file.write_text(json.dumps([max(best, newest_step), fruitless]))
        if fruitless == FRUITLESS:
            self.raise_one(
                "crash loop", f"{fruitless} attempts in a row made no step beyond {best:,.0f}"
            )


def follow(
    run: Any,
    rows: Callable[[], Iterator[Row]],
    ended: threading.Event,
    alerts: Alerts,
    first: dict[str, Any],
) -> int:
    """Log `rows` until `ended`, each at its step, without those that W&B already has.

    `first` goes with the first of them. Returns the last step that W&B has.
    """
    newest = run.starting_step - 1
    last_look = False
    while not last_look:
        last_look = ended.wait(POLL_SECONDS)
        for row in rows():
            step = int(row["step"])
            alerts.saw(row)
            if step >= max(newest, run.starting_step):
                run.log({**row, **first}, step=step)
                newest, first = step, {}
        if not last_look:
            alerts.look()
    return newest


def open_run(options: Options) -> Any:
    """The W&B run, online where that is wanted and possible, else offline."""
    folder = Path(options.folder)
    known: dict[str, Any] = {
        "dir": folder,
        "id": options.id,
        "name": folder.name,
        "project": options.project,
        "config": _config(folder / "config.yaml"),
    }
    if options.mode == "auto":
        try:
            if wandb.login(verify=False, prompt=False):
                run = wandb.init(resume="allow", settings=_settings(), **known)
                return _rewritten(run, known) if options.verify else run
        except (wandb.Error, ValueError) as error:
            print(f"Weights & Biases cannot be used, going on offline: {error}", flush=True)
            wandb.teardown()
    run = wandb.init(mode="offline", settings=_settings(), **known)
    for older in (folder / "wandb").glob(f"offline-run-*-{options.id}"):
        if older != Path(run.dir).parent:
            shutil.rmtree(older, ignore_errors=True)
    return run


def agrees(theirs: Sequence[Row], ours: Sequence[Row]) -> bool:
    """Whether W&B's rows are ours as far as they go: none left out, none twice, no other values."""
    return len(theirs) <= len(ours) and all(
        row["_step"] == step["step"] and all(_same(row.get(key), step[key]) for key in step)
        for row, step in zip(theirs, ours, strict=False)
    )


def _same(theirs: float | str | None, ours: float) -> bool:
    return theirs is not None and (float(theirs) == ours or math.isnan(ours))


def by_step(rows: Iterable[Row]) -> list[Row]:
    """Rows that share a step as one, which is how W&B has them; ascending."""
    steps: dict[float, Row] = {}
    for row in rows:
        steps.setdefault(row["step"], {}).update(row)
    return [steps[step] for step in sorted(steps)]


def _rewritten(run: Any, known: dict[str, Any]) -> Any:
    """The run itself, or, when W&B's copy has gaps or other rows, a new one in its place.

    W&B takes no step that lies before its last one, so a copy that is wrong cannot be mended.
    ``wandb/id`` remembers the new id, under which the run goes on.
    """
    if not run.resumed:
        return run
    folder = known["dir"]
    theirs = list(wandb.Api().run(run.path).scan_history(use_cache=False))
    if agrees(theirs, by_step(Tail(folder / "metrics.jsonl").rows())):
        return run
    base, _, number = known["id"].partition("-")
    newer = f"{base}-{int(number or 1) + 1}"
    print(f"W&B's copy {known['id']} differs from metrics.jsonl; writing {newer}")
    run.tags = (*run.tags, "superseded")
    run.finish()
    (folder / "wandb" / "id").write_text(newer)
    return wandb.init(resume="allow", settings=_settings(), **{**known, "id": newer})


def define_axes(run: Any) -> None:
    """Steps along x; tokens for what is measured on held-out text. Every row has both."""
    run.define_metric("step")
    run.define_metric("tokens")
    run.define_metric("*", step_metric="step")
    run.define_metric("val/*", step_metric="tokens")


def models_table(models: list[dict[str, Any]]) -> dict[str, Any]:
    """The table of the learners' models, if there are any."""
    if not models:
        return {}
    table = wandb.Table(columns=list(models[0]))
    for one in models:
        table.add_data(*one.values())
    return {"models": table}


def log_results(run: Any, folder: Path, step: int) -> None:
    """The held-out results as a table and as summary values, and the report with its pictures.

    They join the row of the last `step`, or, where W&B had that before, the summary alone.
    """
    try:
        results = parse_json((folder / "evaluation.json").read_bytes())
        learners, scores = results["learners"], [one["name"] for one in results["columns"]]
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # none, or a damaged file
        return
    columns = ["parameters", *scores, "retention", "tokens_per_second"]
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


def main(options: Options) -> None:
    """Follow the run until its trainer ends."""
    os.nice(10)  # training comes first
    ended, last_words = threading.Event(), []

    def listen() -> None:
        last_words.append(sys.stdin.readline().strip())
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    folder = Path(options.folder)
    run = open_run(options)
    define_axes(run)
    tail = Tail(folder / "metrics.jsonl")
    known = list(Tail(folder / "metrics.jsonl").rows())
    rollbacks = max((row.get("rollbacks", 0.0) for row in known), default=0.0)
    alerts = Alerts(run, folder, options.stalled_after, rollbacks)
    if not options.verify:
        alerts.notice_crash_loop(max((row["step"] for row in known), default=0.0))
    step = follow(run, tail.rows, ended, alerts, models_table(options.models))
    if last_words == ["completed"]:
        log_results(run, folder, step)
        run.finish(exit_code=0)
        return
    if last_words == ["stopped"]:
        run.mark_preempting()
    run.finish(exit_code=1)


def _config(path: Path) -> dict[str, Any]:
    """The job's config, and the git revision in the first line of its file."""
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    config = configs.plain(text, str(path))
    first = text.partition("\n")[0]
    if first.startswith(REVISION):
        config["git_revision"] = first.removeprefix(REVISION)
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
