"""A job on this rank: everything the training loop needs, opened or resumed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import configs
from data_pipeline import Corpus, contents, open_corpora
from trainer.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    Retention,
    newest_intact,
    newest_sound,
)
from trainer.config import JobConfig
from trainer.control.run_context import RunContext
from trainer.errors import TrainingError
from trainer.evaluation.held_out import Scores, ValidationSet
from trainer.evaluation.primary import primary_column
from trainer.evaluation.trained_heads import trained_heads
from trainer.job_data.batch_plan import global_batches
from trainer.job_data.feed import Feed
from trainer.job_data.fit import require_fit, require_same_tokenizers
from trainer.learner_names import TEACHER
from trainer.learners.admission import HOUR
from trainer.learners.engine import DeepSpeedEngine
from trainer.learners.learner import Learner, StepShape
from trainer.learners.learners import Learners
from trainer.learners.state import JobState
from trainer.lifecycle.resumption import what_is_resumed
from trainer.lifecycle.start import accept
from trainer.record.gauges import Gauges
from trainer.record.recorder import Recorder
from trainer.run_folder.folder import RunFolder
from trainer.step import StepResult
from trainer.tracking import tracking
from trainer.watch.first_failure import on_rank_0
from trainer.watch.replicas import verify
from trainer.watch.rollback import applied_state, checkpoint_to_resume, recovery_advice

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_log = logging.getLogger(__name__)


class Job:
    """A run in progress: the data, the learners, the record, and how far it has come.

    A context manager. All methods are collective.
    """

    def __init__(self, config: JobConfig, device: torch.device, context: RunContext) -> None:
        """Open the data, build the learners, and go back to the newest intact checkpoint.

        Raises DataError, ModelError, TrainingError or CheckpointError when the job cannot run.
        """
        self.config, self.device, self.context = config, device, context
        self.folder = RunFolder.of(config)
        corpora = open_corpora(config.data)
        require_fit(config, corpora)
        feed = Feed(config, corpora, context.attempt.number)
        self.masker = feed.masker
        self._validation = ValidationSet(config, context.hang_watch.heartbeat, corpora)
        self._unigram = self._validation.unigram()
        context.startup.mark("data")
        newest = newest_intact(self.folder.checkpoints, _log.warning, dist.group.WORLD)
        checkpoint = checkpoint_to_resume(newest, config.rollback)
        context.startup.mark("finding a checkpoint")
        require_same_tokenizers(config, corpora, set(checkpoint.learners) if checkpoint else set())
        self.state = self._state_of(checkpoint, contents(config.data, corpora))
        self.learners = Learners(config, _step_shape(config, corpora), self.state, checkpoint)
        context.startup.mark("building and loading the learners")
        self._writer = CheckpointWriter(
            self.folder.checkpoints,
            _retention(config),
            context.attempt,
            _log.warning,
            resumed_from=checkpoint.step if checkpoint else None,
            max_failures=config.checkpoint.max_failures,
        )
        on_rank_0(lambda: self._accept(checkpoint, newest))
        self._evaluations: dict[str, tuple[int, float]] = {}  # the newest: step, held-out loss
        self._teacher_evaluated_at: int | None = None  # the step
        self._saved_at = self.state.step
        self._began = time.monotonic() - self.state.seconds
        self._seconds = self.state.seconds  # on which all ranks agree
        self._open = ExitStack()
        gauges = Gauges(config, self.folder, context.attempt.number, device)
        kept_rows = checkpoint.metrics if checkpoint else b""
        self.recorder = Recorder(
            config, self.folder, self.state, gauges, kept_rows, speaks=dist.get_rank() == 0
        )
        self._open.enter_context(self.recorder)
        self.batches = self._open.enter_context(feed).start(self.state.step)
        for line in what_is_resumed(config, checkpoint, newest):
            self.recorder.say(line)
        if checkpoint is not None and checkpoint.suspect:
            self.recorder.warn(f"its checkpoint is suspect: {checkpoint.suspect}")

    @property
    def is_done(self) -> bool:
        """Whether its steps or its hours are used up."""
        return self.state.step >= self.config.steps or self._seconds >= _deadline(self.config)

    @property
    def seconds(self) -> float:
        """Of training, over all restarts, by this rank's clock."""
        return time.monotonic() - self._began

    def grow_teacher(self) -> None:
        """Double the teacher's layers where the config says so."""
        if self.learners.grow_teacher(self.state.step):
            layers = self.learners.teacher.config.model.layers
            self.recorder.say(f"step {self.state.step:,}: the teacher grows to {layers} layers")

    def admit_students(self) -> None:
        """Start the students whose time has come."""
        for name in self.learners.admit(self.state, self._unigram):
            if self.state.step:
                self.recorder.say(f"step {self.state.step:,}: {name} joins")

    def advance(self, result: StepResult) -> None:
        """Count a step that was made, and record it."""
        self.state.step += 1
        self.state.tokens += result.tokens
        self._count_unreadable(result.unreadable)
        self.state.seconds = self.seconds
        learners = [self.learners.teacher, *self.learners.active]
        trained = [one for one in learners if one.is_trained]
        for learner in trained:
            learner.counters.tokens += result.tokens
        self._seconds = result.seconds
        self.learners.mark_finished(self.state.step, self._seconds)
        self.recorder.step(self.state, result, learners, self.learners.waiting, self.batches.waited)
        for learner in trained:
            self._note_skip(learner, result.losses[learner.name])

    def save_is_due(self, asked: bool) -> bool:
        """Whether to save: as often as the config says, when asked to, or for those who are done.

        Not while somebody skips steps: the checkpoint to go back to is the one before them.
        """
        at_work = [self.learners.teacher, *self.learners.active]
        if any(learner.counters.guard.in_a_row for learner in at_work):
            return asked
        every = self.config.checkpoint.every
        return (
            asked
            or self.learners.has_finished_at(self.state.step)
            or self.state.step // every > self._saved_at // every
        )

    def evaluate(self) -> None:
        """Score every learner on held-out text, and record it."""
        where = (self.device, dist.get_rank(), dist.get_world_size())
        found: dict[str, Scores] = {}
        for name, learner in self.learners.by_name.items():
            metrics = learner.metrics
            trained = trained_heads(learner.config, learner.counters, self.state.step)
            scores = self._validation.evaluate(
                learner.evaluate, metrics, self.config.batch.micro_batch, *where
            )
            found[name] = scores.of_trained_heads(metrics, trained)
            if (loss := found[name].overall.get("loss")) is not None:
                self._evaluations[name] = (self.state.step, loss)
        known = {name: one for name, one in found[TEACHER].overall.items() if one is not None}
        self.state.teacher_held_out = known
        self._teacher_evaluated_at = self.state.step
        self.recorder.held_out(self.state, found)

    def save(self, wait: bool = False) -> None:
        """Checkpoint everyone and everything; training goes on meanwhile unless `wait`.

        Students that are done are let go of, once a checkpoint has them. Raises DivergenceError
        when the ranks' replicas differ: what is saved is sound.
        """
        self.verify_replicas()
        finishing = self.learners.finishing
        self.state.learners = self.learners.counters()
        self.state.teacher_layers = self.learners.teacher.config.model.layers
        self.state.rows = self.recorder.rows
        began = time.monotonic()
        self._writer.save(
            self.state.step,
            self._engines(),
            self.state.to_json(),
            metric=self._merit,
            wait=wait,
            then=self.context.request_box.answer_after_save(self.state.step),
            carried=self.learners.finished,
            metrics=self.recorder.rows_for_checkpoint(),
            evaluations=self._evaluations,
        )
        self._saved_at = self.state.step
        if finishing and self._writer.wait():
            self.learners.release_finished()
            for name in finishing:
                self.recorder.say(f"step {self.state.step:,}: {name} has used up its budget")
        if not wait:
            self.recorder.stalled(time.monotonic() - began)

    @property
    def _merit(self) -> float | None:
        """What ranks checkpoints: the teacher's primary metric, where it was just measured."""
        is_new = self._teacher_evaluated_at == self.state.step
        if not (is_new and self.learners.teacher.is_trained):
            return None
        return (self.state.teacher_held_out or {}).get(primary_column(self.config).name)

    def verify_replicas(self) -> None:
        """Raise DivergenceError unless all ranks hold the same where they should."""
        verify(self._engines(), self.state.step)

    def finish(self) -> None:
        """The last checkpoint, and a word about students that never joined."""
        self.save(wait=True)
        for name in self.learners.waiting:
            self.recorder.say(f"{name} never joined: its `start` was not reached")

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.close()

    def _accept(self, checkpoint: Checkpoint | None, newest: Checkpoint | None) -> None:
        """Write down where and with which config the run resumes: nothing refuses it any more."""
        if checkpoint is not None and checkpoint is not newest:
            self.context.attempt.disown_after(checkpoint.step)
        accept(self.config)

    def _count_unreadable(self, sequences: int) -> None:
        if sequences and not self.state.unreadable:
            self.recorder.say(
                f"step {self.state.step:,}: there are sequences that cannot be read; they are "
                f"passed over and counted, and {self.folder.logs} names the shards"
            )
        self.state.unreadable += sequences

    def _note_skip(self, learner: Learner, loss: float) -> None:
        """Say it; raise TrainingError when it happens too often in a row."""
        if learner.skipped is None:
            return
        step, in_a_row = self.state.step, learner.counters.guard.in_a_row
        self.recorder.say(
            f"step {step:,}: {learner.name} is skipped: {learner.skipped} ({loss:.4g})"
        )
        if in_a_row > learner.config.guard.max_consecutive_skips:
            self._writer.wait()
            newest = self._writer.last_published or 0
            sound = newest_sound(self.folder.checkpoints, before=newest + 1)
            back_to = sound.step if sound else None
            advice = recovery_advice(
                self.config.rollback, newest, back_to, range(step - in_a_row, step)
            )
            raise TrainingError(
                f"{learner.name} skipped {in_a_row} steps in a row ({learner.skipped} at step "
                f"{step}); {advice}"
            )

    def _engines(self) -> dict[str, DeepSpeedEngine]:
        return {name: learner.engine for name, learner in self.learners.by_name.items()}

    def _state_of(self, checkpoint: Checkpoint | None, corpora: dict[str, str]) -> JobState:
        if checkpoint is None:
            state = JobState(wandb_id=tracking.first_id(self.folder.path))
        else:
            state = JobState.from_json(checkpoint.trainer_state)
        state.config = configs.dump(self.config)
        state.corpora = corpora
        state.rolled_back = applied_state(self.config.rollback)
        return state


def _retention(config: JobConfig) -> Retention:
    keep = config.checkpoint
    column = primary_column(config)
    return Retention(keep.keep, keep.keep_every, keep.keep_best, column.higher_is_better)


def _step_shape(config: JobConfig, corpora: Mapping[str, Corpus]) -> StepShape:
    """How a step is cut up: as few, as large micro-batches as the config allows."""
    rows = max(global_batches(config, corpora).sizes) // dist.get_world_size()
    micro_batch = min(config.batch.micro_batch, rows)
    accumulation = -(-rows // micro_batch)
    return StepShape(config.steps, config.seed, micro_batch, accumulation, _deadline(config))


def _deadline(config: JobConfig) -> float:
    """In seconds of training."""
    return math.inf if config.hours is None else config.hours * HOUR
