"""The learners of a run's newest checkpoint, without engines."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property

from torch import Tensor

from data_pipeline import Corpus, open_corpora
from model import Model, build
from trainer.checkpoint import Checkpoint, newest_intact
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.evaluation.trained_heads import trained_heads
from trainer.learner_config import LearnerConfig
from trainer.learner_names import TEACHER, is_teacher, student_key
from trainer.learners.first_weights import model_state
from trainer.learners.state import JobState
from trainer.run_folder.folder import RunFolder

_log = logging.getLogger(__name__)


class SavedLearners:
    """Read access to the newest intact checkpoint of a run."""

    def __init__(self, folder: RunFolder, corpora: Mapping[str, Corpus] | None = None) -> None:
        """`corpora` are those of the run's job, if they are already open.

        Raises TrainingError when there is no checkpoint yet.
        """
        checkpoint = newest_intact(folder.checkpoints, _log.warning)
        if checkpoint is None:
            raise TrainingError(f"{folder.path}: no checkpoint yet; run `tandem train` first")
        self.folder: RunFolder = folder
        self.checkpoint: Checkpoint = checkpoint
        self.job: JobConfig = folder.load_config()
        self._corpora = corpora

    @cached_property
    def corpora(self) -> Mapping[str, Corpus]:
        """The corpora of the run's job. Raises DataError where one of them is missing."""
        return self._corpora or open_corpora(self.job.data)

    @property
    def names(self) -> list[str]:
        """The learners that the run's config still names, the teachers first."""
        there = self.job.learners.keys() & set(self.checkpoint.learners)
        return sorted(there, key=lambda name: (not is_teacher(name), name))

    def resolve(self, learner: str) -> str:
        """The full name of a learner given as such, or of a student given as `NAME`."""
        for name in (learner, student_key(learner)):
            if name in self.names:
                return name
        there = ", ".join(name.removeprefix("students/") for name in self.names)
        raise TrainingError(f"{self.checkpoint.path}: no learner {learner}; there are: {there}")

    def config(self, name: str) -> LearnerConfig:
        """The config of the learner with this full name, with a growing teacher's current model."""
        if name == TEACHER:
            return self.job.teacher.with_layers(self.state.teacher_layers)
        return self.job.learners[name]

    @cached_property
    def state(self) -> JobState:
        """The job's state at the checkpoint."""
        return JobState.from_json(self.checkpoint.trainer_state)

    def trained_heads(self, name: str) -> frozenset[str]:
        """The trained heads of the learner with this full name."""
        counters = self.state.learners[name]
        config = self.config(name).in_steps(self.job.steps)
        return trained_heads(config, counters, self.checkpoint.step)

    def weights(self, name: str) -> dict[str, Tensor]:
        """The model's float32 weights, without its objective's projections."""
        return model_state(self.checkpoint.master_weights(name))

    def load(self, name: str) -> Model:
        """The model, in evaluation mode, on the CPU."""
        model = build(self.config(name).architecture, seed=0)
        model.load_state_dict(self.weights(name))
        return model.eval()
