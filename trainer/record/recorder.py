"""The record of a run in progress: the metrics file, the display, trackers; `tandem sync`.

Only rank 0 writes. `metrics.jsonl` is the record; the others are views of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from configs.durable import atomic_write
from data_pipeline import DEFAULT_VIEW
from model import describe
from trainer.checkpoint.attempts import live_owner, published
from trainer.checkpoint.reader import newest_intact
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.evaluation.held_out import Scores
from trainer.evaluation.setbacks import Setback
from trainer.learners.learner import Learner
from trainer.learners.state import JobState
from trainer.record.display import Display
from trainer.record.gauges import Gauges
from trainer.report.page import LiveReport, write_report
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder
from trainer.run_folder.metrics import MetricsLog, resume
from trainer.run_folder.run_files import read_evaluation
from trainer.scoring.columns import TASK_MEAN
from trainer.step import StepResult
from trainer.tracking import trackers


def models_table(job: JobConfig) -> list[dict[str, Any]]:
    """A table of the job's models for trackers: a row for each learner, the teachers first."""
    rows = []
    for name, config in job.learners.items():
        size = describe(config.architecture, job.data.longest, job.data.highest_masking_rate)
        rows.append(
            {
                "learner": name,
                "parameters": size.parameters,
                "layers": config.model.layers,
                "hidden_size": config.model.hidden_size,
                "heads": config.model.heads,
                "mflops_per_token": round(size.flops_per_token / 1e6, 3),
                "objective": ", ".join(config.objective.terms()),
                "zero_stage": config.zero_stage,
                "precision": config.precision,
            }
        )
    return rows


_log = logging.getLogger(__name__)


class Recorder:
    """Writes the rows of `metrics.jsonl` and keeps the display and W&B up to date."""

    def __init__(
        self,
        config: JobConfig,
        folder: RunFolder,
        state: JobState,
        gauges: Gauges,
        kept_rows: bytes,
        speaks: bool,
    ) -> None:
        """Cut the metrics back to `state`; `kept_rows` are the rows in its checkpoint.

        `speaks` is true on rank 0 only.
        """
        self._config, self._speaks, self._gauges = config, speaks, gauges
        self._stack = contextlib.ExitStack()
        self._stack.callback(gauges.close)
        self._since, self._tokens, self._waited = time.monotonic(), state.tokens, 0.0
        if not speaks:
            return
        resumed = resume(folder.metrics, state.step, kept_rows, state.rows)
        self._log = self._stack.enter_context(MetricsLog(folder.metrics, resumed.rows))
        self._display = self._stack.enter_context(
            Display(
                *(config.name, config.steps, state.step, config.hours, state.seconds),
                config.primary_column,
            )
        )
        self._report = LiveReport(folder.path)
        self._folder = folder
        self._named: set[tuple[str, str]] = set()  # learner and kind of each setback
        self._stack.callback(self._report.close)
        followers = [
            trackers.start(
                folder.path,
                mode=config.log.wandb,
                about=config.log.wandb_run,
                run_id=trackers.current_id(folder.path, state.wandb_id),
                models=models_table(config),
            ),
            *(trackers.start_tracker(folder.path, name) for name in config.log.trackers),
        ]
        self._followers = [follower for follower in followers if follower is not None]
        if told := str(resumed):
            self.warn(told)

    def step(
        self,
        state: JobState,
        result: StepResult,
        learners: Sequence[Learner],
        waiting: list[str],
        waited: float,
    ) -> None:
        """Record the step that led to `state`, if it is to be logged, or show it. Collective.

        `waited` is how many seconds this process has waited for batches so far.
        """
        if not self._is_logged(state.step):
            if self._speaks:
                self._display.advance(state.step, state.seconds)
            return
        speed, wait = self._since_last(state, waited)
        measured, lines = self._gauges.read(state.step, speed, learners)
        if not self._speaks:
            return
        measured |= {"tokens_per_second": speed, "data_wait": wait}
        row = {**_row(state, result, learners), **result.shares, **measured}
        self._append(row)
        self._display.update(state.step, row, waiting)
        self._report.refresh()
        for line in lines:
            self.say(line)

    def before(self, step: int) -> None:
        """Called before the job's `step`."""
        self._gauges.before(step, self._is_logged(step + 1))

    def stalled(self, seconds: float) -> None:
        """Count seconds for which a checkpoint has stopped training."""
        self._gauges.stalled(seconds)

    def held_out(
        self, state: JobState, scores: Mapping[str, Scores], setbacks: Sequence[Setback] = ()
    ) -> None:
        """Record a held-out evaluation of every learner, and name the students with setbacks.

        Trackers that have ended by themselves are named too.
        None is the score of an untrained head.
        """
        if not self._speaks:
            return
        row: dict[str, float] = {"step": state.step, "tokens": state.tokens}
        for learner, evaluated in scores.items():
            for corpus, score in evaluated.by_corpus.items():
                for column, value in score.items():
                    if value is not None:
                        row[metrics.held_out_key(corpus, learner, column)] = value
            if (mean := evaluated.overall.get(TASK_MEAN.name)) is not None:
                row[metrics.held_out_key(metrics.TASKS, learner, TASK_MEAN.name)] = mean
        self._append(row)
        primary = self._config.primary_column.name
        untrained = [
            name for name, results in scores.items() if results.overall.get(primary, 0.0) is None
        ]
        self._display.update(state.step, row, untrained=untrained)
        self._name(setbacks)
        for follower in self._followers:
            follower.check()

    def say(self, message: str) -> None:
        """Write one line to the display and to the log."""
        if self._speaks:
            _log.info(message)
            self._display.say(message)

    def warn(self, message: str) -> None:
        """Write one line to standard error and to the log, about what needs attention."""
        if self._speaks:
            _log.warning(message)

    @property
    def rows(self) -> int | None:
        """How many rows there are; None on ranks that do not write them."""
        return self._log.rows if self._speaks else None

    def rows_for_checkpoint(self) -> Callable[[], bytes] | None:
        """A function that returns a checkpoint's rows; None on ranks that do not write them."""
        return self._log.rows_for_checkpoint() if self._speaks else None

    def finish(self, *, completed: bool) -> None:
        """Wait for the trackers to catch up; `completed`: whether the job reached its end."""
        if not self._speaks:
            return
        if not completed:
            try:
                write_report(self._folder.path)
            except OSError as error:  # a full disk: the checkpoint matters more
                _log.warning("the report was not written: %s", error)
        trackers.finish_all(self._followers, completed=completed)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _name(self, setbacks: Sequence[Setback]) -> None:
        """Report each setback once, when it begins; the file has those of the newest evaluation."""
        for setback in setbacks:
            if (setback.learner, setback.kind) not in self._named:
                self.say(f"step {setback.step:,}: {setback.says}")
        self._named = {(setback.learner, setback.kind) for setback in setbacks}
        with contextlib.suppress(OSError):  # a full disk: the log has the lines
            atomic_write(
                self._folder.setbacks,
                json.dumps([dataclasses.asdict(setback) for setback in setbacks]),
            )

    def _append(self, row: metrics.Row) -> None:
        """Write a row; report once when writing fails, and once when it works again."""
        before = self._log.error
        self._log.append(row)
        if self._log.error and not before:
            self.warn(f"{self._folder.metrics}: {self._log.error}; its rows are kept in memory")
        elif before and not self._log.error:
            self.say(f"{self._folder.metrics} has all its rows again")

    def _is_logged(self, step: int) -> bool:
        return step % self._config.log.every == 0 or step == self._config.steps

    def _since_last(self, state: JobState, waited: float) -> tuple[float, float]:
        """Since the last logged step: tokens per second, and the fraction of time spent waiting."""
        now = time.monotonic()
        seconds, tokens, wait = (
            now - self._since,
            state.tokens - self._tokens,
            waited - self._waited,
        )
        self._since, self._tokens, self._waited = now, state.tokens, waited
        return tokens / seconds, wait / seconds


def _row(state: JobState, result: StepResult, learners: Sequence[Learner]) -> dict[str, float]:
    row: dict[str, float] = {
        "step": state.step,
        "tokens": state.tokens,
        "seconds": state.seconds,
        "rollbacks": len(state.rolled_back),
        "padding": 1.0 - result.tokens[DEFAULT_VIEW] / result.positions,
    }
    if state.unreadable:
        row["unreadable"] = state.unreadable
    for learner in learners:
        name = learner.name
        if name not in result.losses:  # a frozen learner
            continue
        row[f"{name}/loss"] = result.losses[name]
        row |= {f"{name}/{term}": value for term, value in result.terms[name].items()}
        row[f"{name}/lr"] = learner.rate
        row[f"{name}/grad_norm"] = learner.gradient_norm
        row[f"{name}/skipped_steps"] = learner.counters.skipped_steps
        if learner.objective.lead is not None:
            row[f"{name}/lead"] = learner.counters.lead
        if learner.config.precision == "fp16":
            row[f"{name}/overflows"] = learner.counters.overflows
            row[f"{name}/loss_scale"] = learner.loss_scale.value
    return row


PATIENCE_SECONDS = 3600.0


def sync(folder: RunFolder) -> str:
    """Send W&B the metrics that it lacks, and other trackers all; returns a message for the user.

    With a key, W&B's server then has every logged step, once and in order. Without a key, there is
    a single, complete offline folder. Raises TrainingError while the run is live (it sends its own
    metrics), if its metrics are damaged, if a tracker cannot be reached, and if W&B is off and
    there is no other.
    """
    if owner := live_owner(folder.path):
        raise TrainingError(f"{folder.path}: is running ({owner}), and sends its metrics itself")
    if not any(folder.attempts.glob("*.json")) and not published(folder.checkpoints):
        raise TrainingError(f"{folder.path}: never trained (no attempts/), so there is no W&B run")
    metrics.read(folder.metrics)  # raises for a line that is not a row
    config = folder.load_config()
    completed = read_evaluation(folder.evaluation) is not None
    lines = [_sync_tracker(folder, name, completed) for name in config.log.trackers]
    run_id = _run_id(folder)
    following = trackers.start(
        folder.path,
        mode="auto",
        about=config.log.wandb_run,
        run_id=run_id,
        models=models_table(config),
        verify=True,
    )
    if following is None:
        if os.environ.get("WANDB_MODE") != "disabled":
            raise TrainingError("Weights & Biases was not started, as the line above says")
        if not lines:
            raise TrainingError("WANDB_MODE=disabled: Weights & Biases is off; unset it")
        return "\n".join(lines)
    if not following.finish(completed=completed, seconds=PATIENCE_SECONDS):
        raise TrainingError(f"Weights & Biases did not take it; see {folder.logs / 'wandb.log'}")
    offline = sorted(folder.path.glob(f"wandb/offline-run-*-{run_id}"))
    if offline:
        lines += [f"{offline[-1]} is complete; to upload it: wandb sync {offline[-1]}"]
    else:
        lines += [f"W&B's run {_run_id(folder)} has every step of {folder.metrics}"]
    return "\n".join(lines)


def _sync_tracker(folder: RunFolder, name: str, completed: bool) -> str:
    following = trackers.start_tracker(folder.path, name)
    if following is None or not following.finish(completed=completed, seconds=PATIENCE_SECONDS):
        raise TrainingError(f"{name} did not take it; see {folder.logs / f'{name}.log'}")
    return f"{name} has every step of {folder.metrics}"


def _run_id(folder: RunFolder) -> str:
    checkpoint = newest_intact(folder.checkpoints, _log.warning)
    if checkpoint is not None:
        first = str(checkpoint.trainer_state["wandb_id"])
    else:
        first = trackers.first_id(folder.path)
    return trackers.current_id(folder.path, first)
