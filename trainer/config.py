"""The schema of a job YAML: a teacher or several, any number of students, one stream of data."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from configs.rules import (
    COUNT,
    HOURS,
    INDEX,
    NOT_EMPTY,
    PATH,
    SECONDS,
    FolderName,
    Matches,
    OneOf,
    Unit,
    positive,
)
from configs.section import Refusal, Section
from configs.typed import convert
from data_pipeline import TASK_NAME, Corpus, DataConfig
from model import ModelConfig
from trainer.batch_config import BatchConfig, GrowthConfig
from trainer.checkpoint.folder import Ranking, Retention
from trainer.job_tree import with_models, with_named_heads, with_tasks
from trainer.learner_config import LearnerConfig
from trainer.learner_names import TEACHER, section_of, student_key, teacher_key
from trainer.measure import ProfileConfig
from trainer.roles import conflicts_about_metrics, conflicts_of_roles, conflicts_with_data
from trainer.scoring.columns import TASK_MEAN, Column
from trainer.scoring.scores import Metrics, columns_of
from trainer.tasks import load_plugins
from trainer.tracking import kinds as _kinds  # noqa: F401 - registers those shipped
from trainer.tracking import trackers
from trainer.watch.guard import RollbackConfig, conflicts_in_order

LEARNER_NAME = Matches(r"(?!\d)[\w-]+", "made of letters, digits, - and _, and begin with no digit")
TAG = Matches(r"(?s:.{1,64})", "of 1 to 64 characters")


@dataclass
class LogConfig(Section):
    """How often metrics are logged, and where."""

    every: Annotated[int, COUNT, Unit("steps"), "Steps between rows of metrics."] = 10
    wandb: Annotated[
        str,
        OneOf(*trackers.MODES),
        "The mode of Weights & Biases; auto: online if there is a key, otherwise offline.",
    ] = "auto"
    project: Annotated[str, NOT_EMPTY, "The project in Weights & Biases."] = "tandem"
    entity: Annotated[str, "The user or team that owns the run there; empty: your own."] = ""
    group: Annotated[str, "The group of the run there, such as a sweep; empty: none."] = ""
    job_type: Annotated[str, "The type of the run there, such as pretrain; empty: none."] = ""
    tags: Annotated[list[Annotated[str, TAG]], "The tags of the run there."] = field(
        default_factory=list
    )
    notes: Annotated[str, "A description of the run there."] = ""
    trackers: Annotated[
        list[str],
        "Trackers in addition to Weights & Biases: tensorboard, mlflow, or trackers that "
        "`plugins` register.",
    ] = field(default_factory=list)

    def conflicts(self) -> Iterator[Refusal]:
        for number, name in enumerate(self.trackers):
            if why := trackers.why_not(name):
                yield f"trackers[{number}]", why

    @property
    def wandb_run(self) -> dict[str, Any]:
        """The arguments of ``wandb.init`` that say where a run belongs and what it is."""
        names = ("project", "entity", "group", "job_type", "tags", "notes")
        return {name: getattr(self, name) or None for name in names}


@dataclass
class EvaluationConfig(Section):
    """Held-out evaluation, on sequences of the validation split."""

    every: Annotated[
        int | None,
        COUNT,
        Unit("steps"),
        "Steps between evaluations. null: 500, or a tenth of the job's steps if that is less.",
    ] = None
    sequences: Annotated[
        int, COUNT, Unit("sequences"), "How many sequences of each corpus are scored."
    ] = 512
    metric: Annotated[
        str | None,
        NOT_EMPTY,
        "The run's primary metric: a held-out score of the teacher. On text it is loss, "
        "accuracy or pair_accuracy; on a task it is HEAD_SCORE, such as "
        "single_sentence_accuracy, or bleu. It decides when students start and which "
        "checkpoints are kept, and learners are compared by it. null: the primary score of "
        "the first head; with several tasks task_mean, the mean of their primary scores. "
        "If a student does not have this score, the primary score of its own first head is "
        "used.",
    ] = None
    final: Annotated[
        str,
        OneOf("last", "best"),
        "Which checkpoint of each learner is scored and exported at the end: the last one, or "
        "the one with its best evaluation.metric.",
    ] = "last"

    def every_in(self, steps: int) -> int:
        """Steps between evaluations in a job of this many steps."""
        return self.every or max(1, min(500, steps // 10))


@dataclass
class StopConfig(Section):
    """When learners end before the job's steps are used up. The job ends with the last of them."""

    patience: Annotated[
        int | None,
        COUNT,
        Unit("evaluations"),
        "A learner's training ends after this many held-out evaluations in a row "
        "without a new best; its own `budget.patience` takes precedence. null: never.",
    ] = None


@dataclass
class CheckpointConfig(Section):
    """When checkpoints are saved, and which of them are kept."""

    every: Annotated[int, COUNT, Unit("steps"), "Steps between checkpoints."] = 500
    keep: Annotated[int, COUNT, "How many of the newest are kept."] = 3
    keep_every: Annotated[
        int | None, COUNT, Unit("steps"), "Also keep checkpoints at multiples of this step."
    ] = None
    keep_best: Annotated[
        int,
        INDEX,
        "For each trained learner, also keep this many checkpoints with its best "
        "evaluation.metric, among the checkpoints saved right after an evaluation. In a "
        "job of a task, and if evaluation.final is best, every new best is saved.",
    ] = 1
    max_failures: Annotated[int, COUNT, "The run fails after this many failed saves in a row."] = 3


@dataclass
class WatchConfig(Section):
    """Checks that detect failures while a job runs."""

    replicas_every: Annotated[
        int,
        COUNT,
        Unit("steps"),
        "Steps between comparisons of the ranks' replicas. The ranks also compare them "
        "before every checkpoint.",
    ] = 100
    hang_timeout_s: Annotated[
        float,
        SECONDS,
        Unit("s"),
        "A rank without progress for this long writes its stacks to its log and exits. "
        "Progress is a step, a scored batch, a part of the start or an export. Collectives "
        "time out a minute later.",
    ] = 1800.0


@dataclass
class JobConfig(Section):
    """One job: everything that `tandem train` needs."""

    name: Annotated[str, FolderName(), "The name of the run and of its folder."]
    data: DataConfig
    teacher: Annotated[LearnerConfig, "The model that the students learn from."]
    teachers: Annotated[
        dict[Annotated[str, LEARNER_NAME], LearnerConfig],
        "Further teachers, frozen, by name; a term names one of them, or their mean.",
    ] = field(default_factory=dict, kw_only=True)
    steps: Annotated[
        int, INDEX, Unit("steps"), "Optimizer steps of the job; 0: `epochs` decides."
    ] = 0
    epochs: Annotated[
        float | None,
        positive(1e6),
        Unit("epochs"),
        "How often each training example of a task is read; instead of `steps`.",
    ] = None
    tasks: Annotated[
        dict[Annotated[str, TASK_NAME], str],
        PATH,
        "Tasks that are learned together, one in each step: for each task a name of "
        "configs/task, or a file. They become `data.tasks` and the `tasks` of objectives.",
    ] = field(default_factory=dict)
    students: Annotated[
        dict[Annotated[str, LEARNER_NAME], LearnerConfig],
        "Models that learn from the teacher in the same job, by name.",
    ] = field(default_factory=dict)
    batch: BatchConfig = field(default_factory=BatchConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    log: LogConfig = field(default_factory=LogConfig)
    rollback: Annotated[
        list[RollbackConfig],
        "Returns to a checkpoint and skips batches. Leave entries in place once they have been "
        "applied.",
    ] = field(default_factory=list)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    output_dir: Annotated[
        str, PATH, NOT_EMPTY, "The folder in which the run's folder is created."
    ] = "runs"
    plugins: Annotated[
        list[str],
        PATH,
        "Your own Python files that define tasks, modules of heads, terms of objectives, "
        "optimizers, schedules, packings, trackers or kinds of models.",
    ] = field(default_factory=list)
    seed: Annotated[int, "The seed of order, masks, dropout and random weights."] = 0
    deterministic: Annotated[
        bool,
        "On GPUs, use kernels that add in a fixed order. They are slower, but repeated "
        "runs are then equal to the last bit, as they always are on CPUs.",
    ] = False
    hours: Annotated[
        float | None,
        HOURS,
        Unit("hours"),
        "The job also ends when it has trained for this long, over all restarts. Learning-rate "
        "schedules that span the job then reach their end at this deadline.",
    ] = None
    device: Annotated[
        str,
        OneOf("auto", "cuda", "cpu"),
        "Where the job computes. auto: on GPUs if PyTorch sees any, otherwise on the CPU; "
        "a GPU that PyTorch cannot use is refused. cuda: only on GPUs.",
    ] = "auto"
    license: Annotated[
        str, NOT_EMPTY, "The license of exported models, as an identifier of the Hugging Face Hub."
    ] = "other"

    @classmethod
    def declare(cls, tree: Mapping[str, Any]) -> None:
        """Load the `plugins` in a job's tree, whose terms become keys of an objective."""
        load_plugins(convert(tree["plugins"], list[str], "plugins"))

    @classmethod
    def compose(cls, tree: Mapping[str, Any]) -> dict[str, Any]:
        """The tree of a job with the sections that others of its keys stand for.

        The `tasks` become sections of data and objectives. A learner without a `model` gets the
        model of its init.pretrained, and the heads of a frozen one the names of tasks. Paths of
        plugins become absolute: a run's config can be read in any folder.
        """
        if "plugins" in tree:
            tree = {**tree, "plugins": [os.path.abspath(path) for path in tree["plugins"]]}
        return with_named_heads(with_models(with_tasks(tree, cls)))

    @functools.cached_property
    def batch_sizes(self) -> BatchConfig:
        """The `batch` with the sizes that phases of the data begin with."""
        begun = [
            GrowthConfig(phase.from_step, phase.batch) for phase in self.data.phases if phase.batch
        ]
        growth = sorted([*self.batch.growth, *begun], key=lambda phase: phase.step)
        return dataclasses.replace(self.batch, growth=growth)

    @functools.cached_property
    def in_steps(self) -> JobConfig:
        """This job with fractions of its steps converted to steps, and learners' own patience."""

        def converted(learner: LearnerConfig) -> LearnerConfig:
            patience = None if learner.frozen else self.stop.patience
            return learner.with_patience(patience).in_steps(self.steps)

        students = {name: converted(student) for name, student in self.students.items()}
        teacher = converted(self.teacher)
        if (teacher, students) == (self.teacher, self.students):
            return self
        return dataclasses.replace(self, teacher=teacher, students=students)

    @property
    def other_teachers(self) -> dict[str, LearnerConfig]:
        """The further teachers, by their names among learners."""
        return {teacher_key(name): teacher for name, teacher in self.teachers.items()}

    @property
    def other_models(self) -> dict[str, ModelConfig]:
        """The models of the further teachers, by the same names."""
        return {name: teacher.model for name, teacher in self.other_teachers.items()}

    @property
    def learners(self) -> dict[str, LearnerConfig]:
        """Everyone, by name (`trainer.learner_names`): the teachers, then the students."""
        students = {student_key(name): student for name, student in self.students.items()}
        return {TEACHER: self.teacher, **self.other_teachers, **students}

    @property
    def tokenizers(self) -> list[str]:
        """The tokenizers that learners have beside the job's, once each."""
        named = (learner.tokenizer for learner in self.learners.values())
        return list(dict.fromkeys(folder for folder in named if folder is not None))

    def read_by(self, learner: LearnerConfig, corpus: Corpus) -> Corpus:
        """A corpus of the job as a learner's tokenizer reads it."""
        if learner.tokenizer is None:
            return corpus
        if self.data.has_examples:
            return corpus.read_by(self.tokenizers.index(learner.tokenizer))
        return corpus.read_by(corpus.number_of(Path(learner.tokenizer)))

    def metrics_of(self, learner: LearnerConfig) -> Metrics:
        """The metrics of a learner of this job."""
        return learner.metrics_among(self.learners.values())

    @property
    def columns(self) -> dict[str, Column]:
        """The held-out scores of the teacher, by name; of several tasks, their mean first."""
        return columns_of(self.metrics_of(self.teacher), self.data.tasks)

    @property
    def primary_column(self) -> Column:
        """The run's primary metric: what admission, retention of checkpoints and report read."""
        columns = self.columns
        if self.evaluation.metric is not None:
            return columns[self.evaluation.metric]
        return columns.get(TASK_MEAN.name) or self.metrics_of(self.teacher)[0].primary

    def primary_of(self, learner: LearnerConfig) -> Column | None:
        """The primary metric of a learner of this job; None if it has no head to be scored."""
        metrics = self.metrics_of(learner)
        columns = columns_of(metrics, self.data.tasks)
        primary = self.primary_column
        return columns.get(primary.name) or (metrics[0].primary if metrics else None)

    @property
    def rankings(self) -> tuple[Ranking, ...]:
        """How the checkpoints of each learner that is trained are ranked."""
        trained = {name: learner for name, learner in self.learners.items() if not learner.frozen}
        columns = {name: self.primary_of(learner) for name, learner in trained.items()}
        return tuple(
            Ranking(name, column.name, column.higher_is_better)
            for name, column in columns.items()
            if column is not None
        )

    @property
    def retention(self) -> Retention:
        """Which checkpoints of the run are kept."""
        keep = self.checkpoint
        averages = [learner.average for learner in self.learners.values()]
        return Retention(
            *(keep.keep, keep.keep_every, keep.keep_best, self.rankings),
            regular=keep.every,
            averaged=max((average.window for average in averages if average), default=0),
        )

    @property
    def saves_best(self) -> bool:
        """Whether a checkpoint is saved wherever a learner's evaluation is its best."""
        is_wanted = self.data.has_examples or self.evaluation.final == "best"
        return is_wanted and self.checkpoint.keep_best > 0

    def conflicts(self) -> Iterator[Refusal]:
        if self.evaluation.final == "best" and not self.checkpoint.keep_best:
            yield "checkpoint.keep_best", "must be 1 or more if evaluation.final is best"
        yield from self._conflicts_of_first_stages()
        if self.stop.patience and self.teacher.stacking.steps:
            yield "stop.patience", "is for a teacher of one size; remove it, or teacher.stacking"
        if self.stop.patience and self.teacher.average is not None and self.students:
            why = "a teacher that ends before its students keeps no average; remove one of the two"
            yield "stop.patience", why
        generators = {learner.generator for learner in self.learners.values()}
        if self.stop.patience and not generators.isdisjoint(self.students):
            yield "stop.patience", "may end a generator before its discriminator; remove it"
        yield from self._conflicts_of_length()
        grown = {growth.step for growth in self.batch.growth}
        for number, phase in enumerate(self.data.phases):
            if phase.batch and phase.from_step in grown:
                why = f"batch.growth has another at step {phase.from_step}; remove one"
                yield f"data.phases[{number}].batch", why
        yield from conflicts_in_order(self.rollback)
        yield from conflicts_of_roles(self.teacher, self.teachers, self.students)
        yield from conflicts_about_metrics(self.columns, self.students, self.evaluation.metric)
        yield from conflicts_with_data(self.learners, self.data)

    def _conflicts_of_first_stages(self) -> Iterator[Refusal]:
        for name, learner in self.learners.items():
            first, section = learner.task_first, section_of(name)
            if first and first.from_best and not self.checkpoint.keep_best:
                why = f"must be 1 or more, or {section}.task_first.from_best false"
                yield "checkpoint.keep_best", why
            if first and self.evaluation.final == "best":
                why = f"must be last: the best of {section} may be of before its branches learnt"
                yield "evaluation.final", why
            if first and (self.stop.patience or learner.budget.patience):
                where = f"{section}.budget" if learner.budget.patience else "stop"
                why = (
                    f"no score gets better while branches learn; remove it, or {section}.task_first"
                )
                yield f"{where}.patience", why

    def _conflicts_of_length(self) -> Iterator[Refusal]:
        if self.epochs is None and not self.steps:
            yield "steps", "must be set, or the epochs of a task"
        if self.epochs is not None and not self.data.has_examples:
            yield "epochs", "are for examples: name data.train, or tasks; for text, set steps"
        if self.epochs is not None and self.steps:
            yield "epochs", "steps is set too; set epochs to null, or steps to 0"
        if self.data.has_examples and (self.batch.tokens or self.batch.growth):
            yield "batch", "a task's batch has one size, in examples; set batch.size alone"
        if self.data.has_examples and self.batch.micro_tokens:
            yield "batch.micro_tokens", "is for text; set batch.micro_batch alone"
