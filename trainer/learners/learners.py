"""The teachers and the students of a job: which have started, and how each is built."""

import gc
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from model import build, double_layers
from trainer.batch_config import StepShape
from trainer.checkpoint.layout import full_state_dict
from trainer.checkpoint.reader import Checkpoint
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.job_data.other_tokenizers import shared_ids, shared_spans
from trainer.learner_config import LearnerConfig
from trainer.learner_life import layers_of_the_moment
from trainer.learner_names import TEACHER, is_student, is_teacher, section_of, student_key
from trainer.learners import first_weights
from trainer.learners.engine import DeepSpeedEngine, free_engine
from trainer.learners.learner import Learner
from trainer.learners.module import weights_seed
from trainer.learners.state import JobState, LearnerState, has_no_patience_left, is_due, is_over


class Learners:
    """The learners of a job that have started, in the order of the config."""

    def __init__(
        self,
        config: JobConfig,
        step_shape: StepShape,
        state: JobState,
        checkpoint: Checkpoint | None,
        tokenizer_dir: Path,
    ) -> None:
        """Restore the learners that `checkpoint` holds and the config still names, as of `state`.

        Without a checkpoint, build the teachers alone, from their initial weights. `tokenizer_dir`
        is the folder of the tokenizer that they share. Collective, like every method.
        """
        self._tokenizer_dir = tokenizer_dir
        self.config = config.in_steps
        self.step_shape = step_shape
        teacher = self.config.teacher
        first = self._first_weights(TEACHER, teacher) if checkpoint is None else None
        # One that has finished in the last step keeps its average and moments, if the job is over.
        has_finished = (
            checkpoint is not None
            and self._is_done(TEACHER, teacher, state)
            and checkpoint.is_frozen(TEACHER)
        )
        layers = state.teacher_layers or self._layers_at(0)
        self.teacher = self._build_teacher(layers, first, has_finished)
        held = set() if checkpoint is None else set(checkpoint.learners)
        self.others: list[Learner] = []  # further teachers
        for name, other in self.config.other_teachers.items():
            weights = None if name in held else self._first_weights(name, other)
            self.others.append(self._build(name, other, 0, weights))
        # By the students' full names, as are these that have started, and those that have finished.
        students = self.config.students.items()
        self._configs = {student_key(name): student for name, student in students}
        self._students: dict[str, Learner] = {}
        self._finished: dict[str, LearnerState] = {}
        if checkpoint is not None:
            self._restore(checkpoint, state)

    @property
    def students(self) -> list[Learner]:
        """The students that have started, in the order of the config."""
        return [self._students[name] for name in self._configs if name in self._students]

    @property
    def active(self) -> list[Learner]:
        """The students in training; a finished one stays, unchanged, until it is checkpointed."""
        return [student for student in self.students if student.counters.finished_at is None]

    @property
    def teachers(self) -> list[Learner]:
        """The job's own teacher, then the others."""
        return [self.teacher, *self.others]

    @property
    def by_name(self) -> dict[str, Learner]:
        """Every learner, by its name in metrics and checkpoints; the teachers first."""
        return {learner.name: learner for learner in [*self.teachers, *self.students]}

    def scored_at(self, step: int) -> dict[str, Learner]:
        """The learners that an evaluation after `step` steps scores, by name.

        A student that finished before waits for a checkpoint only: a resumed run no longer has it.
        """
        return {
            name: learner
            for name, learner in self.by_name.items()
            if is_teacher(name) or learner.counters.finished_at in (None, step)
        }

    @property
    def engines(self) -> dict[str, DeepSpeedEngine]:
        """Every learner's engine, by the same name."""
        return {name: learner.engine for name, learner in self.by_name.items()}

    @property
    def waiting(self) -> list[str]:
        """The names of the students that have not started."""
        begun = self._students.keys() | self._finished.keys()
        return [name for name in self._configs if name not in begun]

    @property
    def finished(self) -> list[str]:
        """The names of the students that have finished and are only in checkpoints."""
        return [name for name in self._configs if name in self._finished]

    @property
    def finishing(self) -> list[str]:
        """The names of the students that have finished but are still in memory."""
        return [
            student.name for student in self.students if student.counters.finished_at is not None
        ]

    def grow_teacher(self, step: int) -> bool:
        """Double the teacher's layers if that is due before `step`; returns whether it was.

        From then on students learn from the layers at the same relative depths.
        """
        due, now = self._layers_at(step), self.teacher.config.model.layers
        if now >= due:
            return False
        if 2 * now != due:
            raise TrainingError(
                f"teacher.stacking.steps: the teacher has {now} layers, and {due} at step {step} "
                "would not be twice as many; put the old steps back"
            )
        weights = first_weights.model_state(full_state_dict(self.teacher.engine))
        _, doubled = double_layers(weights, self.teacher.config.architecture)
        self._rebuild_teacher(due, doubled)
        for student in self.students:
            student.set_teacher_layers(due)
        return True

    def finish_teacher(self) -> str:
        """Freeze the teacher once it is done; it keeps teaching. Returns the reason, or "".

        The engine and the optimizer states are freed; the weights stay.
        """
        if not self.teacher.is_trained or self.teacher.counters.finished_at is None:
            return ""
        why = self.why_finished(TEACHER)
        weights = first_weights.model_state(full_state_dict(self.teacher.engine))
        self._rebuild_teacher(self.teacher.config.model.layers, weights, has_finished=True)
        return why

    def admit(self, state: JobState, unigram: Mapping[str, float]) -> list[str]:
        """Start the students that are due; returns their names."""
        joined = []
        primary = self.config.primary_column.name
        for name in self.waiting:
            config = self._configs[name]
            if is_due(config.start, state, unigram, primary):
                weights = self._first_weights(name, config)
                self._students[name] = self._build(name, config, state.step, weights)
                joined.append(name)
        return joined

    def mark_finished(self, step: int, seconds: float) -> None:
        """Mark the learners that have used up their budget by this step and time of the job."""
        for learner in [self.teacher, *self.active]:
            budget, counters = learner.config.budget, learner.counters
            if learner.is_trained and is_over(budget, counters, step, seconds):
                counters.finish(step, seconds)

    @property
    def are_done(self) -> bool:
        """Whether no learner is left to train, now or later."""
        has_finished = self.teacher.counters.finished_at is not None
        return (
            not self.active and not self.waiting and (has_finished or not self.teacher.is_trained)
        )

    def why_finished(self, name: str) -> str:
        """Why a learner has finished."""
        learner = self.by_name[name]
        best, score = learner.counters.best, self.config.primary_of(learner.config)
        patience_left = not has_no_patience_left(learner.config.budget, learner.counters)
        if best is None or score is None or patience_left:
            return "has used up its budget"
        shown = f"{score.heading} {score.written(best.value)}"
        return f"has not done better than {shown} at step {best.step:,} (patience)"

    def has_best_at(self, step: int) -> bool:
        """Whether a learner's newest evaluation is its best."""
        bests = [learner.counters.best for learner in [self.teacher, *self.students]]
        return any(best is not None and best.step == step for best in bests)

    def returning_to_best(self, step: int) -> list[Learner]:
        """The learners whose `step` continues from their best weights so far."""
        return [
            learner for learner in [self.teacher, *self.active] if learner.returns_to_best(step)
        ]

    def has_finished_at(self, step: int) -> bool:
        """Whether a student has just used up its budget."""
        return any(student.counters.finished_at == step for student in self.students)

    def release_finished(self) -> None:
        """Free the engines of finished students, once a checkpoint holds them."""
        for name in list(self._students):
            if self._students[name].counters.finished_at is not None:
                self._finished[name] = self._students[name].counters
                free_engine(self._students.pop(name).engine)
                gc.collect()  # engines and their hooks refer to each other

    def counters(self) -> dict[str, LearnerState]:
        """Every learner's counters, for the checkpoint."""
        in_memory = {name: learner.counters for name, learner in self.by_name.items()}
        return in_memory | self._finished

    def _restore(self, checkpoint: Checkpoint, state: JobState) -> None:
        for name, config in self._configs.items():
            counters = state.learners.get(name)
            if counters is None:
                continue
            if self._is_done(name, config, state):
                self._finished[name] = counters
            else:
                self._students[name] = self._build(name, config, counters.started_at)
        for name, learner in self.by_name.items():
            if name in state.learners:  # otherwise a teacher that was added since
                learner.resume(checkpoint, state.learners[name])

    def _is_done(self, name: str, config: LearnerConfig, state: JobState) -> bool:
        """Whether a learner of the checkpoint has used up its budget, which may have been edited.

        A smaller budget may finish it. Raises TrainingError if a larger budget comes too late,
        because the learner was already done.
        """
        counters = state.learners[name]
        over = is_over(config.budget, counters, state.step, state.seconds)
        if over and counters.finished_at is None:
            counters.finish(state.step, state.seconds)
        elif counters.finished_at is not None and not over:
            made = counters.finished_at - counters.started_at
            raise TrainingError(
                f"{section_of(name)}.budget: a larger budget comes too late: the learner finished "
                f"at step {counters.finished_at}; put the old budget back (if it is a fraction of "
                f"steps that you have raised, set {section_of(name)}.budget.steps={made}), or fork "
                "the run from an earlier step"
            )
        return counters.finished_at is not None

    def _first_weights(self, name: str, config: LearnerConfig) -> Mapping[str, Tensor] | None:
        """The initial weights; None for random ones."""
        section = section_of(name)
        if config.init.weights is not None:
            return first_weights.from_folder(
                section, config.init, config.architecture, config.frozen
            )
        if config.init.tile is not None:
            seed = weights_seed(name, config, self.step_shape.seed)
            return first_weights.from_smaller(section, config.init.tile, config.architecture, seed)
        if config.init.teacher_layers is not None:
            final, now = self.config.teacher.model.layers, self.teacher.config.model.layers
            layers = layers_of_the_moment(config.init.teacher_layers, final, now)
            return first_weights.from_layers(section, self.teacher, layers)
        if config.init.teacher_embeddings:
            return first_weights.from_embeddings(self.teacher, config.architecture)
        if config.init.word_vectors is not None:
            drawn = build(config.architecture, weights_seed(name, config, self.step_shape.seed))
            tokenizer = Path(config.tokenizer or self._tokenizer_dir)
            return first_weights.from_word_vectors(config.init.word_vectors, tokenizer, drawn)
        return None

    def _layers_at(self, step: int) -> int:
        teacher = self.config.teacher
        return teacher.stacking.layers_at(step, teacher.model.layers)

    def _rebuild_teacher(
        self, layers: int, weights: Mapping[str, Tensor], has_finished: bool = False
    ) -> None:
        """Replace the teacher by one with these weights and the same counters."""
        counters = self.teacher.counters
        free_engine(self.teacher.engine)
        del self.teacher  # before the new one takes memory
        gc.collect()
        self.teacher = self._build_teacher(layers, weights, has_finished)
        self.teacher.counters = counters

    def _build_teacher(
        self, layers: int, weights: Mapping[str, Tensor] | None, has_finished: bool
    ) -> Learner:
        teacher = self.config.teacher
        if has_finished:
            students = self.config.students.values()
            teacher = teacher.finished(any(student.waits_for(teacher) for student in students))
        if teacher.stored is not None:
            teacher = teacher.at_rest()
        return self._build(TEACHER, teacher.with_layers(layers), 0, weights)

    def _build(
        self,
        key: str,
        config: LearnerConfig,
        started_at: int,
        weights: Mapping[str, Tensor] | None = None,
    ) -> Learner:
        is_compared = is_student(key) and config.waits_for(self.config.teacher)
        learner = Learner(
            key,
            config,
            self.config.teacher.model,
            self.step_shape,
            started_at,
            weights,
            metrics=self.config.metrics_of(config),
            others=self.config.other_models,
            shared=shared_spans(self.config, config, partial(shared_ids, self._tokenizer_dir)),
            is_compared=is_compared,
        )
        if weights is not None and not config.init.embeddings_only:
            given = first_weights.heads_in(weights, learner.model.state_dict())
            given += first_weights.heads_without_weights(learner.model) if config.frozen else []
            learner.counters.given_heads = given
        if not is_teacher(key):
            learner.set_teacher_layers(self.teacher.config.model.layers)
        return learner
