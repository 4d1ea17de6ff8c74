"""A job on this rank: everything the training loop needs, opened or resumed."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from configs.progress import counted
from data_pipeline import DEFAULT_VIEW, Corpus, open_corpora
from data_pipeline.reading.corpus import SPLITS
from trainer.batch_config import StepShape
from trainer.checkpoint.writer import CheckpointWriter
from trainer.config import JobConfig
from trainer.control import RunContext
from trainer.evaluation.evaluations import Evaluations
from trainer.evaluation.held_out import ValidationSet
from trainer.job_data.counting import count_sequences, global_batches
from trainer.job_data.feed import Feed
from trainer.job_data.fit import require_fit, require_pretrained
from trainer.learner_names import TEACHER
from trainer.learners.learners import Learners
from trainer.learners.state import HOUR
from trainer.lifecycle.in_progress import Saving, SkipLimit
from trainer.lifecycle.start import (
    Resumption,
    changes_since_checkpoint,
    require_same_order,
    require_same_teacher,
)
from trainer.record.gauges import Gauges
from trainer.record.recorder import Recorder
from trainer.run_folder.folder import RunFolder
from trainer.step import StepResult
from trainer.watch.guard import first_step
from trainer.watch.ranks import on_rank_0, verify

_log = logging.getLogger(__name__)


class Job:
    """A run in progress: its data, learners, record and state.

    A context manager. All methods are collective.
    """

    def __init__(self, config: JobConfig, device: torch.device, context: RunContext) -> None:
        """Open the data, build the learners and resume from the newest intact checkpoint, if any.

        Raises DataError, ModelError, TrainingError or CheckpointError when the job cannot run.
        """
        self.config, self.context, self.folder = config, context, RunFolder.of(config)
        self.corpora = open_corpora(config.data)
        changes = on_rank_0(lambda: changes_since_checkpoint(config, self.corpora))
        require_fit(config, self.corpora)
        on_rank_0(lambda: require_same_order(config, self.corpora))
        resumption = Resumption.find(config)
        on_rank_0(resumption.require_same_stage)
        context.opened("finding a checkpoint")
        require_pretrained(config, self.corpora, resumption.learners)
        # A job that is refused has written nothing to its corpora.
        count_sequences(config.data, self.corpora, SPLITS, context.hang_watch.heartbeat)
        feed = Feed(config, self.corpora, context.attempt.number)
        self.masker = feed.masker
        validation = ValidationSet(config, self.corpora, context.hang_watch.heartbeat)
        self.evaluations = Evaluations(config, validation, device, resumption.checkpoint)
        context.opened("data")
        self.state = resumption.state(self.corpora)
        shape = step_shape(config, self.corpora)
        tokenizer_dir = next(iter(self.corpora.values())).tokenizer_dir
        self.learners = Learners(config, shape, self.state, resumption.checkpoint, tokenizer_dir)
        require_same_teacher(config, self.learners.teacher)
        context.opened("building and loading the learners")
        self._began = time.monotonic() - self.state.seconds
        self._seconds = self.state.seconds  # the same on all ranks
        self._take_over(resumption, feed, device)
        sizes = global_batches(config, self.corpora).sizes
        self.recorder.say(setup_line(config, shape, sizes, device, self.folder.path))
        if any(learner.is_compiled for learner in self.learners.by_name.values()):
            self.recorder.say("compiling: each learner's first step may take minutes")
        self._tell(resumption, changes)

    def _take_over(self, resumption: Resumption, feed: Feed, device: torch.device) -> None:
        """Open the run's checkpoints, record and data for writing: all checks have passed."""
        config, context, state = self.config, self.context, self.state
        writer = _checkpoint_writer(config, context, resumption)
        on_rank_0(lambda: resumption.accept(context.attempt))
        self._open = ExitStack()
        gauges = Gauges(config, self.folder, context.attempt.number, device)
        kept_rows = resumption.checkpoint.metrics if resumption.checkpoint else b""
        recorder = Recorder(
            config, self.folder, state, gauges, kept_rows, speaks=dist.get_rank() == 0
        )
        self.recorder = self._open.enter_context(recorder)
        self.batches = self._open.enter_context(feed).start(state.step)
        self._skip_limit = SkipLimit(config, writer, recorder)
        parts = self.learners, state, self.evaluations, recorder
        self.saving = Saving(config, writer, context.request_box, *parts)

    @property
    def is_done(self) -> bool:
        """Whether its steps or its hours are used up, or every learner is done."""
        is_over = self.state.step >= self.config.steps or self._seconds >= _deadline(self.config)
        return is_over or self.learners.are_done

    @property
    def evaluates_now(self) -> bool:
        """Whether the learners are scored after this step: the last one may be the best."""
        step = self.state.step
        is_final = self.config.evaluation.final == "best" and self.is_done
        is_compared = is_final or bool(self.learners.returning_to_best(step))
        return is_compared or step % self.config.evaluation.every_in(self.config.steps) == 0

    @property
    def seconds(self) -> float:
        """Training time over all restarts, by this rank's clock."""
        return time.monotonic() - self._began

    def grow_teacher(self) -> None:
        """Double the teacher's layers where the config says so."""
        if self.learners.grow_teacher(self.state.step):
            layers = self.learners.teacher.config.model.layers
            self.recorder.say(f"step {self.state.step:,}: the teacher grows to {layers} layers")

    def finish_teacher(self) -> None:
        """Freeze the teacher once its budget is used up; it keeps teaching."""
        if why := self.learners.finish_teacher():
            self.recorder.say(f"step {self.state.step:,}: the teacher {why} and keeps teaching")

    def admit_students(self) -> None:
        """Start the students that are due."""
        for name in self.learners.admit(self.state, self.evaluations.unigram):
            if self.state.step:
                self.recorder.say(f"step {self.state.step:,}: {name} joins")

    def advance(self, result: StepResult) -> None:
        """Count and record a finished step."""
        self.state.step += 1
        self.state.tokens += result.tokens[DEFAULT_VIEW]
        self._count_unreadable(result.unreadable)
        self.state.seconds = self.seconds
        learners = [*self.learners.teachers, *self.learners.active]
        trained = [learner for learner in learners if learner.is_trained]
        for learner in trained:
            learner.counters.tokens += result.tokens[learner.view]
        self._seconds = result.seconds
        self.learners.mark_finished(self.state.step, self._seconds)
        self.recorder.step(self.state, result, learners, self.learners.waiting, self.batches.waited)
        self._skip_limit.check(self.state.step, trained, result.losses)

    def evaluate(self) -> None:
        """Score every learner on held-out text, record it, and finish those without patience."""
        self.saving.average_checkpoints(self.is_done)
        scores = self.evaluations.run(self.learners, self.state)
        setbacks = self.evaluations.setbacks(self.learners, self.state)
        self.recorder.held_out(self.state, scores, setbacks)
        self.learners.mark_finished(self.state.step, self._seconds)
        self.state.seconds = self.seconds  # a run that resumes counts this evaluation too

    def verify_replicas(self) -> None:
        """Raise DivergenceError if the ranks' replicas differ."""
        verify(self.learners.engines, self.state.step)

    def finish(self) -> None:
        """Save the last checkpoint; report a teacher's early end, and students that never joined.

        Raises TrainingError if a learner has diverged, or has learned nothing.
        """
        self.saving.save(wait=True, is_last=True)
        teacher, step = self.learners.teacher, self.state.step
        if teacher.is_trained and teacher.counters.finished_at and step < self.config.steps:
            self.recorder.say(f"step {step:,}: {TEACHER} {self.learners.why_finished(TEACHER)}")
        for name in self.learners.waiting:
            self.recorder.say(f"{name} never joined: its `start` was not reached")
        self._skip_limit.check_at_end(self.state.step, self.learners.counters())

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.close()

    def _tell(self, resumption: Resumption, changes: list[str]) -> None:
        """Report where the run resumes, and what has changed since."""
        for line in resumption.lines():
            self.recorder.say(line)
        if resumption.checkpoint is not None and resumption.checkpoint.suspect:
            self.recorder.warn(f"its checkpoint is suspect: {resumption.checkpoint.suspect}")
        for change in changes:
            self.recorder.say(f"changed since the newest checkpoint: {change}")

    def _count_unreadable(self, sequences: int) -> None:
        if sequences and not self.state.unreadable:
            self.recorder.say(
                f"step {self.state.step:,}: some sequences cannot be read; they are skipped and "
                f"counted, and {self.folder.logs} names the shards"
            )
        self.state.unreadable += sequences


def _checkpoint_writer(
    config: JobConfig, context: RunContext, resumption: Resumption
) -> CheckpointWriter:
    return CheckpointWriter(
        RunFolder.of(config).checkpoints,
        config.retention,
        context.attempt,
        _log.warning,
        resumed_from=resumption.checkpoint.step if resumption.checkpoint else None,
        max_failures=config.checkpoint.max_failures,
    )


def step_shape(config: JobConfig, corpora: Mapping[str, Corpus]) -> StepShape:
    """The shape of a step: as few micro-batches, as large as the config allows."""
    rows = max(global_batches(config, corpora).sizes) // dist.get_world_size()
    longest = max(length for length, _ in config.data.lengths_and_packings())
    return StepShape(
        config.steps,
        config.seed,
        min(config.batch.micro_batch, rows),
        accumulation=-(-rows // min(config.batch.micro_rows(longest), rows)),
        micro_tokens=config.batch.micro_tokens,
        seconds=_deadline(config),
        phases=tuple(
            (first_step(phase.from_step, config.rollback), phase.rope_theta)
            for phase in config.data.phases
        ),
        is_ragged=config.data.has_examples,
    )


def setup_line(
    config: JobConfig, shape: StepShape, sizes: Sequence[int], device: torch.device, folder: Path
) -> str:
    """The first line of a run: device, ranks, threads, precision, largest batch and folder.

    sizes: of its global batches, in rows.
    """
    rows, largest = max(sizes), "largest " if min(sizes) < max(sizes) else ""
    ranks, threads = dist.get_world_size(), torch.get_num_threads()
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    trained = [learner for learner in config.learners.values() if not learner.frozen]
    precisions = dict.fromkeys(learner.precision for learner in trained or [config.teacher])
    micro = min(shape.micro_rows(config.data.sequence_length), max(1, rows // ranks))
    accumulation = -(-rows // (micro * ranks))
    up_to = "" if micro * accumulation * ranks == rows else "up to "
    return " · ".join(
        (
            place,
            counted(ranks, "rank"),
            f"{counted(threads, 'thread')} each",
            " and ".join(precisions),
            f"{largest}batch {rows:,} = {up_to}{micro} x {accumulation} x {ranks} "
            "(micro-batch x accumulation x ranks)",
            str(folder),
        )
    )


def _deadline(config: JobConfig) -> float:
    """The job's limit on training time, in seconds."""
    return math.inf if config.hours is None else config.hours * HOUR
