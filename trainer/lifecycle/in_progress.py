"""A job in progress: when it saves and what its checkpoints hold, and the limit of skipped steps.

A skipped step is reported; too many in a row, or in all, end the job with advice.
"""

import time
from collections.abc import Iterable, Mapping

import torch.distributed as dist

from trainer.checkpoint.attempts import published
from trainer.checkpoint.folder import is_regular
from trainer.checkpoint.reader import Checkpoint, intact, newest_sound
from trainer.checkpoint.writer import CheckpointWriter
from trainer.config import JobConfig
from trainer.control import RequestBox
from trainer.errors import CheckpointError, TrainingError, UnreadableCheckpoint
from trainer.evaluation.evaluations import Evaluations
from trainer.learner_names import section_of
from trainer.learners.engine import average_checkpoints
from trainer.learners.learner import Learner
from trainer.learners.learners import Learners
from trainer.learners.state import JobState, LearnerState
from trainer.record.recorder import Recorder
from trainer.run_folder.folder import RunFolder
from trainer.watch.guard import GuardConfig, recovery_advice
from trainer.watch.ranks import on_rank_0, verify


class Saving:
    """Takes the checkpoints of a job in progress."""

    def __init__(
        self,
        config: JobConfig,
        writer: CheckpointWriter,
        request_box: RequestBox,
        learners: Learners,
        state: JobState,
        evaluations: Evaluations,
        recorder: Recorder,
    ) -> None:
        self._every, self._writer, self._request_box = config.checkpoint.every, writer, request_box
        self._saves_best, self._folder = config.saves_best, RunFolder.of(config).checkpoints
        self._learners, self._state = learners, state
        self._evaluations, self._recorder = evaluations, recorder
        self._saved_at = state.step
        self._averaged: set[tuple[str, int]] = set()  # learners, each with a step
        self._verified: dict[int, Checkpoint | None] = {}

    def is_due(self, requested: bool) -> bool:
        """Whether to save: as the config says, on request, or when a learner has finished.

        While a learner skips steps, save a new best and on request only: a rollback needs the
        checkpoint before them.
        """
        learners, step = self._learners, self._state.step
        is_wanted = requested or (self._saves_best and learners.has_best_at(step))
        if self._is_skipping:
            return is_wanted
        return (
            is_wanted
            or learners.has_finished_at(step)
            or step // self._every > self._saved_at // self._every
        )

    def save(self, wait: bool = False, *, is_last: bool = False) -> None:
        """Save a checkpoint; training continues meanwhile, unless `wait` is set. Collective.

        `is_last`: the job has ended.
        Finished students are released once a checkpoint holds them. Raises DivergenceError, before
        saving, where the ranks' replicas differ.
        """
        began = time.monotonic()
        finishing = self._learners.finishing
        self.average_checkpoints(is_last)
        self._write(wait)
        self._saved_at = step = self._state.step
        if finishing and self._writer.wait():
            for name in finishing:
                self._recorder.say(f"step {step:,}: {name} {self._learners.why_finished(name)}")
            self._learners.release_finished()
        if not wait:
            self._recorder.stalled(time.monotonic() - began)

    @property
    def _is_skipping(self) -> bool:
        active = [self._learners.teacher, *self._learners.active]
        return any(learner.counters.is_skipping for learner in active)

    def return_to_best(self) -> None:
        """Load the best weights of the learners that continue from them. Collective."""
        step = self._state.step
        for learner in self._learners.returning_to_best(step):
            best = learner.counters.best
            if best is None or best.step == step:
                continue
            self._writer.wait()
            told = f"{learner.name} continues from its"
            if checkpoint := self._intact(best.step, f"{told} last weights"):
                learner.load(checkpoint)
                self._recorder.say(f"step {step:,}: {told} best weights, of step {best.step:,}")

    def average_checkpoints(self, is_last: bool) -> None:
        """Average the weights of learners over their last checkpoints and the one due now, if any.

        Checkpoints that an interruption or a request adds do not count, so that it changes nothing.
        `is_last` is as in `save`. Collective.
        """
        step = self._state.step
        self._state.is_regular = is_last or (step % self._every == 0 and not self._is_skipping)
        averaging = [
            (learner, learner.config.average.window)
            for learner in [self._learners.teacher, *self._learners.students]
            if learner.config.average is not None and learner.config.average.window
            if self._state.is_regular or learner.counters.finished_at is not None
            if (learner.name, step) not in self._averaged
        ]
        if not averaging:
            return
        self._averaged = {(learner.name, step) for learner, _ in averaging}
        self._writer.wait()
        steps = on_rank_0(self._regular_steps)
        for learner, window in averaging:
            since = learner.counters.started_at  # before it, a learner of its name was another
            numbers = [number for number in steps[-(window - 1) :] if number > since]
            recent = [self._intact(n, f"averages are without step {n}") for n in numbers]
            earlier = [checkpoint for checkpoint in recent if checkpoint is not None]
            average_checkpoints(learner.engine, learner.name, earlier)

    def _regular_steps(self) -> list[int]:
        """The steps of the checkpoints before this one that count in averages."""
        before = (number for number in published(self._folder) if number < self._state.step)
        regular = (number for number in before if number % self._every == 0)
        return [number for number in regular if is_regular(self._folder, number)]

    def _intact(self, step: int, instead: str) -> Checkpoint | None:
        """A checkpoint, verified once; None if it is missing or damaged. Collective.

        `instead` tells the user what then happens. Raises UnreadableCheckpoint for one that cannot
        be opened: the next attempt may be able to.
        """
        if step not in self._verified:
            try:
                self._verified[step] = intact(self._folder, step, dist.group.WORLD)
            except UnreadableCheckpoint:
                raise
            except CheckpointError as error:
                self._verified[step] = None
                self._recorder.say(f"{error}: {instead}")
        return self._verified[step]

    def _write(self, wait: bool) -> None:
        learners, state = self._learners, self._state
        verify(learners.engines, state.step)
        state.learners = learners.counters()
        state.teacher_layers = learners.teacher.config.model.layers
        state.rows = self._recorder.rows
        self._writer.save(
            state.step,
            learners.engines,
            state.to_json(),
            scores=self._evaluations.scores_at(state.step),
            wait=wait,
            then=self._request_box.answer_after_save(state.step),
            carried=learners.finished,
            metrics=self._recorder.rows_for_checkpoint(),
            evaluations=self._evaluations.newest,
        )


class SkipLimit:
    """Reports the steps that learners skip, and ends the job when there are too many in a row."""

    def __init__(self, config: JobConfig, writer: CheckpointWriter, recorder: Recorder) -> None:
        self._config, self._writer, self._recorder = config, writer, recorder

    def check(self, step: int, learners: Iterable[Learner], losses: Mapping[str, float]) -> None:
        """Report the learners that skipped the last of `step` steps, and why.

        Raises TrainingError where a learner exceeds ``guard.max_consecutive_skips``.
        """
        for learner in learners:
            if learner.skipped is None:
                continue
            reason = f"{learner.skipped} (loss {losses[learner.name]:.4g})"
            self._recorder.say(f"step {step:,}: {learner.name} is skipped: {reason}")
            in_a_row = learner.counters.guard.in_a_row
            if in_a_row > learner.config.guard.max_consecutive_skips:
                raise TrainingError(
                    f"{learner.name} skipped {in_a_row} steps in a row ({learner.skipped} at step "
                    f"{step}); {self._advice(range(step - in_a_row, step))}"
                )

    def check_at_end(self, step: int, learners: Mapping[str, LearnerState]) -> None:
        """Raise TrainingError where a learner has diverged, or learnt nothing, in `step` steps."""
        for name, counters in learners.items():
            config = self._config.learners.get(name)
            if config is None or config.frozen:
                continue
            if why := _why_failed(config.guard, counters, step):
                raise TrainingError(f"{section_of(name)}: {why}")

    def _advice(self, skipped: range) -> str:
        self._writer.wait()
        folder, before = RunFolder.of(self._config).checkpoints, skipped.start + 1
        newest = max((step for step in published(folder) if step < before), default=0)
        sound = newest_sound(folder, before)
        back_to = sound.step if sound else None
        return recovery_advice(self._config.rollback, newest, back_to, skipped.stop)


def _why_failed(guard: GuardConfig, counters: LearnerState, step: int) -> str:
    """Why a learner's training is no success after `step` steps of the job; empty if it is one."""
    made, taken, skipped = counters.steps_made(step), counters.steps_taken(step), counters.guard
    advice = "lower its optimizer.learning_rate, or look at its data"
    counted = f"{counters.skipped_steps} of its {made} steps were skipped"
    reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.skipped.items())
    if not made:
        return ""
    if counters.skipped_steps > guard.max_skipped_fraction * made:
        return f"{counted} ({reasons}), more than guard.max_skipped_fraction allows; {advice}"
    if skipped.in_a_row:
        return f"its last step was skipped, and {counted} in all ({reasons}); {advice}"
    if not taken:
        return f"none of its {made} steps was taken, since gradients overflowed; {advice}"
    if counters.idle_steps == taken:
        return (
            f"the gradient was zero in each of its {taken} steps: no example has a label to learn"
        )
    return ""
