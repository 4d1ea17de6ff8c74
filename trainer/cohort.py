"""The teacher and the students of a job: who there is, and how each came to be."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from trainer.admission import is_due, is_over
from trainer.checkpoint import Checkpoint
from trainer.config import JobConfig, LearnerConfig
from trainer.first_weights import from_folder, from_layers
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
        self._finished: dict[str, LearnerState] = {}  # by name in the config, like `_students`
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
        there = self._students.keys() | self._finished.keys()
        return [student_key(name) for name in self.config.students if name not in there]

    @property
    def finished(self) -> list[str]:
        """The names of the students that are done: only checkpoints have them any more."""
        return [student_key(name) for name in self.config.students if name in self._finished]

    @property
    def finishing(self) -> list[str]:
        """The names of those that are done, but still in memory."""
        return [one.name for one in self.students if one.counters.finished_at is not None]

    def admit(self, state: JobState, unigram: HeldOut) -> list[str]:
        """Start the students whose time has come; returns their names."""
        joined = []
        for name, config in self.config.students.items():
            key = student_key(name)
            if key in self.waiting and is_due(config.start, state, unigram):
                weights = self._first_weights(key, config)
                self._students[name] = self._build(key, config, state.step, weights)
                joined.append(key)
        return joined

    def mark_finished(self, step: int) -> None:
        """Note who has used up its budget after so many steps of the job."""
        for learner in self.students:
            if is_over(learner.config.stop, learner.counters, step):
                learner.counters.finished_at = step

    def release_finished(self) -> None:
        """Free the engines of those that are done, once a checkpoint has them."""
        for name, learner in list(self._students.items()):
            if learner.counters.finished_at is not None:
                self._finished[name] = learner.counters
                self._students.pop(name).engine.destroy()

    def counters(self) -> dict[str, LearnerState]:
        """What the checkpoint must know of each learner."""
        there = {name: learner.counters for name, learner in self.learners.items()}
        return there | {student_key(name): state for name, state in self._finished.items()}

    def _restore(self, checkpoint: Checkpoint, state: JobState) -> None:
        for name, config in self.config.students.items():
            counters = state.learners.get(student_key(name))
            if counters is None:
                continue
            if is_over(config.stop, counters, state.step):  # the budget may have been cut
                counters.finished_at = counters.finished_at or state.step
            if counters.finished_at is None:
                self._students[name] = self._build(student_key(name), config, counters.started_at)
            else:
                self._finished[name] = counters
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
