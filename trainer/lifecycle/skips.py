"""Skipped steps: each is reported; too many in a row, or in all, end the job with advice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trainer.checkpoint import CheckpointWriter, newest_sound
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.learner_names import section_of
from trainer.learners.learner import Learner
from trainer.learners.state import LearnerState
from trainer.record.recorder import Recorder
from trainer.run_folder.folder import RunFolder
from trainer.watch.guard import GuardConfig
from trainer.watch.rollback import recovery_advice


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
            reason = f"{learner.skipped} ({losses[learner.name]:.4g})"
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

    def _advice(self, steps: range) -> str:
        self._writer.wait()
        newest = self._writer.last_published or 0
        sound = newest_sound(RunFolder.of(self._config).checkpoints, before=newest + 1)
        back_to = sound.step if sound else None
        return recovery_advice(self._config.rollback, newest, back_to, steps)


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
