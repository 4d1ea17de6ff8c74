"""Skipped steps: each is reported, and too many in a row end the job with advice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trainer.checkpoint import CheckpointWriter, newest_sound
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.learners.learner import Learner
from trainer.record.recorder import Recorder
from trainer.run_folder.folder import RunFolder
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

    def _advice(self, steps: range) -> str:
        self._writer.wait()
        newest = self._writer.last_published or 0
        sound = newest_sound(RunFolder.of(self._config).checkpoints, before=newest + 1)
        back_to = sound.step if sound else None
        return recovery_advice(self._config.rollback, newest, back_to, steps)
