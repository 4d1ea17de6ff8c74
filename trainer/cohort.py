"""The teacher and the students of a job: who there is, and how each came to be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from model import ModelError, from_pretrained, select_layers
from trainer.admission import is_due
from trainer.checkpoint import Checkpoint, full_state_dict
from trainer.config import JobConfig, LearnerConfig
from trainer.errors import TrainingError
from trainer.learner import TEACHER, Learner, Workload, student_key
from trainer.state import HeldOut, JobState, LearnerState

# Parameters of a learner's module that belong to the model, not to its objective.
MODEL_PREFIX = "model."


class Cohort:
    """The learners of a job that have started, in the order of the config."""

    def __init__(self, config: JobConfig, workload: Workload) -> None:
        """The teacher alone, at its first weights. Collective, like every method."""
        self.config = config
        self.workload = workload
        self.teacher = self._build(TEACHER, config.teacher, 0, _pretrained(config.teacher))
        self._students: dict[str, Learner] = {}

    @property
    def students(self) -> list[Learner]:
        """Those that have started, in the order of the config."""
        return [self._students[name] for name in self.config.students if name in self._students]

    @property
    def learners(self) -> dict[str, Learner]:
        """Everyone, by the name in metrics and checkpoints; the teacher first."""
        return {learner.name: learner for learner in [self.teacher, *self.students]}

    @property
    def waiting(self) -> list[str]:
        """The names of the students that have not started."""
        return [student_key(name) for name in self.config.students if name not in self._students]

    def restore(self, checkpoint: Checkpoint, state: JobState) -> None:
        """Everyone whom `checkpoint` holds and the config still names, as they were."""
        for name, config in self.config.students.items():
            counters = state.learners.get(student_key(name))
            if counters is not None:
                self._students[name] = self._build(student_key(name), config, counters.started_at)
        for name, learner in self.learners.items():
            learner.counters = state.learners[name]
            checkpoint.load(name, learner.engine)

    def admit(self, state: JobState, unigram: HeldOut) -> list[str]:
        """Start the students whose time has come; returns their names."""
        joined = []
        for name, config in self.config.students.items():
            if name not in self._students and is_due(config.start, state, unigram):
                weights = self._first_weights(name, config)
                key = student_key(name)
                self._students[name] = self._build(key, config, state.step, weights)
                joined.append(key)
        return joined

    def counters(self) -> dict[str, LearnerState]:
        """What the checkpoint must know of each learner."""
        return {name: learner.counters for name, learner in self.learners.items()}

    def _first_weights(self, name: str, config: LearnerConfig) -> Mapping[str, Tensor] | None:
        layers = config.init.teacher_layers
        if layers is None:
            return _pretrained(config)
        whole = full_state_dict(self.teacher.engine)
        teacher = {
            key.removeprefix(MODEL_PREFIX): tensor
            for key, tensor in whole.items()
            if key.startswith(MODEL_PREFIX)
        }
        try:
            return select_layers(teacher, layers, self.config.teacher.model)
        except ModelError as error:
            raise TrainingError(f"students.{name}.init.teacher_layers: {error}") from error

    def _build(
        self,
        key: str,
        config: LearnerConfig,
        started_at: int,
        weights: Mapping[str, Tensor] | None = None,
    ) -> Learner:
        teacher = self.config.teacher.model
        return Learner(key, config, teacher, self.workload, started_at, weights)


def _pretrained(config: LearnerConfig) -> Mapping[str, Tensor] | None:
    if config.init.pretrained is None:
        return None
    return from_pretrained(Path(config.init.pretrained)).state_dict()
