"""The learners of a run as its newest checkpoint holds them, without engines."""

from __future__ import annotations

import logging

from torch import Tensor

from model import MaskedLanguageModel, build
from trainer.checkpoint import Checkpoint, newest_intact
from trainer.config import JobConfig, LearnerConfig
from trainer.errors import TrainingError
from trainer.first_weights import model_state
from trainer.learner import TEACHER, student_key
from trainer.run_folder import RunFolder
from trainer.state import JobState

_log = logging.getLogger(__name__)


class SavedLearners:
    """Read access to the newest intact checkpoint of a run."""

    def __init__(self, folder: RunFolder) -> None:
        """Raise TrainingError when there is no checkpoint yet."""
        checkpoint = newest_intact(folder.checkpoints, _log.warning)
        if checkpoint is None:
            raise TrainingError(f"{folder.path}: no checkpoint yet; run `tandem train` first")
        self.checkpoint: Checkpoint = checkpoint
        self.job: JobConfig = folder.load_config()

    @property
    def names(self) -> list[str]:
        """Everyone, the teacher first."""
        return sorted(self.checkpoint.learners, key=lambda name: (name != TEACHER, name))

    def resolve(self, learner: str) -> str:
        """The full name of a learner given as `teacher`, `NAME` or `students/NAME`."""
        for name in (learner, student_key(learner)):
            if name in self.checkpoint.learners:
                return name
        there = ", ".join(name.removeprefix("students/") for name in self.names)
        raise TrainingError(f"{self.checkpoint.path}: no learner {learner}; there are: {there}")

    def config(self, name: str) -> LearnerConfig:
        """The config of the learner with this full name."""
        if name == TEACHER:
            return self.job.teacher
        student = name.removeprefix("students/")
        if student not in self.job.students:
            raise TrainingError(f"students.{student}: checkpointed, but not in the run's config")
        return self.job.students[student]

    @property
    def state(self) -> JobState:
        """How far the job had come."""
        return JobState.from_json(self.checkpoint.trainer_state)

    def weights(self, name: str) -> dict[str, Tensor]:
        """The model's float32 weights, without its objective's projections."""
        return model_state(self.checkpoint.master_weights(name))

    def load(self, name: str) -> MaskedLanguageModel:
        """The model, in evaluation mode, on the CPU."""
        model = build(self.config(name).model, seed=0)
        model.load_state_dict(self.weights(name))
        return model.eval()
