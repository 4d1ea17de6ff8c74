"""The teacher and the students of a job: who there is, and how each came to be."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from trainer.admission import is_due
from trainer.checkpoint import Checkpoint
from trainer.config import JobConfig, LearnerConfig
from trainer.first_weights import from_embeddings, from_folder, from_layers
from trainer.learner import TEACHER, Learner, Workload, student_key
from trainer.state import HeldOut, JobState, LearnerState


class Cohort:
    """The learners of a job that have started, in the order of the config."""

    def __init__(
        self, config: JobConfig, workload: Workload, state: JobState, checkpoint: Checkpoint | None
    ) -> None:
        """Everyone whom `checkpoint` holds and the config still names, as they were at `state`.

        Without a checkpoint the teacher alone, at its first weights. Collective, like every method.
        """
        self.config = config
        self.workload = workload
        first = self._first_weights(TEACHER, config.teacher) if checkpoint is None else None
        self.teacher = self._build(TEACHER, config.teacher, 0, first)
        self._students: dict[str, Learner] = {}
        if checkpoint is not None:
            self._restore(checkpoint, state)

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

    def admit(self, state: JobState, unigram: HeldOut) -> list[str]:
        """Start the students whose time has come; returns their names."""
        joined = []
        for name, config in self.config.students.items():
            if name not in self._students and is_due(config.start, state, unigram):
                key = student_key(name)
                weights = self._first_weights(key, config)
                self._students[name] = self._build(key, config, state.step, weights)
                joined.append(key)
        return joined

    def counters(self) -> dict[str, LearnerState]:
        """What the checkpoint must know of each learner."""
        return {name: learner.counters for name, learner in self.learners.items()}

    def _restore(self, checkpoint: Checkpoint, state: JobState) -> None:
        for name, config in self.config.students.items():
            counters = state.learners.get(student_key(name))
            if counters is not None:
                self._students[name] = self._build(student_key(name), config, counters.started_at)
        for name, learner in self.learners.items():
            learner.counters = state.learners[name]
            checkpoint.load(name, learner.engine)

    def _first_weights(self, name: str, config: LearnerConfig) -> Mapping[str, Tensor] | None:
        """None: random ones."""
        section = name.replace("/", ".")
        if config.init.pretrained is not None:
            return from_folder(section, config.init.pretrained, config.model)
        if config.init.teacher_layers is not None:
            return from_layers(section, self.teacher, config.init.teacher_layers)
        if config.init.teacher_embeddings:
            return from_embeddings(self.teacher, config.model)
        return None

    def _build(
        self,
        key: str,
        config: LearnerConfig,
        started_at: int,
        weights: Mapping[str, Tensor] | None = None,
    ) -> Learner:
        teacher = self.config.teacher.model
        return Learner(key, config, teacher, self.workload, started_at, weights)
