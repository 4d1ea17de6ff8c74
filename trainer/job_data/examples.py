"""The labelled examples of a job's tasks: encoded once, and used to complete the job's config."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from fractions import Fraction
from pathlib import Path

from data_pipeline import (
    DEFAULT_VIEW,
    Corpus,
    DataError,
    ExampleSplit,
    TaskDataConfig,
    TaskSchedule,
    View,
)
from data_pipeline.examples.reading import layout_of
from data_pipeline.shards import manifest
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.job_data.encoding import SPLITS, TaskOfJob, encoded
from trainer.job_data.task_heads import require_same_labels, with_labels
from trainer.learner_config import LearnerConfig
from trainer.learner_names import section_of
from trainer.objectives.task import TaskConfig


def with_examples(job: JobConfig, renewable: Collection[str] = ()) -> JobConfig:
    """The job, completed from its examples: labels, steps, and the folders of encoded examples.

    The examples are encoded unless that has been done before. A folder that holds other examples is
    refused; one at a key among `renewable` gives way to the folder that an empty path stands for.
    A job that reads text is returned unchanged.

    Raises DataError, naming file and line, for bad examples, and TrainingError without a tokenizer.
    """
    if not job.data.has_examples:
        return job
    tokenizer, totals = _tokenizer_of(job), {}
    for job_task in tasks_of(job):
        ready = _ready(job, job_task, tokenizer, renewable)
        totals[job_task.name] = ExampleSplit(Corpus.open(ready.data.path), "train").total
        job = _with(job, ready)
    steps = job.steps or _steps(job, totals)
    job = dataclasses.replace(job, steps=steps, epochs=None)
    scored_on_test(job)  # so that errors in a test file are raised before training
    return job


def with_validation(job: JobConfig) -> JobConfig:
    """The job, completed for scoring alone: only the validation files are encoded."""
    tasks = tasks_of(job)
    if not all("validation" in job_task.data.task_files for job_task in tasks):
        return with_examples(job)
    tokenizer = _tokenizer_of(job)
    for job_task in tasks:
        ready = _with_labels(job, job_task)
        files = {"val": ready.file("validation").path}
        job = _with(job, _at(ready, encoded(job, ready, tokenizer, files)))
    return job


def tasks_of(job: JobConfig) -> list[TaskOfJob]:
    """The tasks of a job that reads examples, each as the first learner that has it declares it."""
    declared: dict[str, TaskConfig] = {}
    for learner in job.learners.values():
        for name, task in learner.objective.task_terms().items():
            declared.setdefault(name, task)
    if not job.data.tasks:
        return [TaskOfJob(name, task, job.data) for name, task in declared.items()]
    return [TaskOfJob(name, declared[name], data) for name, data in job.data.examples_of.items()]


def scored_on_test(job: JobConfig) -> JobConfig | None:
    """The job with its test files as the examples to score; None if it has no test file.

    `job` comes from `with_examples`. Tasks without a test file keep their examples. The others' are
    encoded unless that has been done before. Raises DataError, naming file and line, for bad ones.
    """
    tested = [job_task for job_task in tasks_of(job) if job_task.data.test]
    for job_task in tested:
        tokenizer = Corpus.open(job_task.data.path).tokenizer_dir
        on_test = dataclasses.replace(job_task, data=dataclasses.replace(job_task.data, path=""))
        try:
            folder = encoded(job, on_test, tokenizer, {"val": job_task.file("test").path})
        except DataError as error:
            other = f"or leave {job_task.key}.test out: `tandem predict` reads files without labels"
            raise DataError(f"{error}; {other}") from None
        job = _with(job, _at(on_test, folder))
    return job if tested else None


def test_contents(job: JobConfig) -> dict[str, str]:
    """The digests of the examples in each task's test file, by task; see `scored_on_test`."""
    scored = scored_on_test(job)
    tested = [job_task for job_task in tasks_of(scored) if job_task.data.test] if scored else []
    return {job_task.name: Corpus.open(job_task.data.path).content for job_task in tested}


def _ready(
    job: JobConfig, job_task: TaskOfJob, tokenizer: Path, renewable: Collection[str]
) -> TaskOfJob:
    """The task, completed from its files, with its examples encoded."""
    job_task = _with_labels(job, job_task)
    files = job_task.data.task_files
    splits = {split: files[of] for split, of in SPLITS.items() if of in files}
    folder = encoded(job, job_task, tokenizer, splits, renewable)
    if "val" not in splits and "val" not in manifest.read(folder)["tally"]["examples"]:
        raise DataError(
            f"{job_task.key}.validation: must be set; {files['train']} has too few examples to "
            f"hold some of them out (or raise {job_task.key}.validation_fraction)"
        )
    job_task = _at(job_task, folder)
    trained = ExampleSplit(Corpus.open(job_task.data.path), "train")
    return dataclasses.replace(job_task, task=job_task.task.trained_on(trained))


def _with_labels(job: JobConfig, job_task: TaskOfJob) -> TaskOfJob:
    """The task with the labels of its training file.

    Raises DataError and TrainingError as `with_examples`.
    """
    files = job_task.data.task_files
    if job_task.task.needs_validation and "validation" not in files:
        raise DataError(f"{job_task.key}.validation: must be set for {job_task.name}")
    _require_files(job_task)
    for key in ("max_trained", "max_scored"):
        if getattr(job_task.data, key) is not None and not job_task.task.can_read_some:
            raise DataError(
                f"{job_task.key}.{key}: {job_task.name} reads whole files only; remove it"
            )
    task = job_task.task.with_labels_of(job_task.file("train"))
    require_same_labels(job, task)
    return dataclasses.replace(job_task, task=task)


def _require_files(job_task: TaskOfJob) -> None:
    """Raise DataError where the task lacks one of its other files, or has one that it ignores."""
    task, files = job_task.task, job_task.data.files
    for file in task.reads:
        if file not in files:
            raise DataError(f"{job_task.key}.files.{file}: must be set for {job_task.name}")
    for file in files.keys() - {*task.reads, *task.may_read}:
        known = ", ".join((*task.reads, *task.may_read)) or "no other files"
        raise DataError(
            f"{job_task.key}.files.{file}: {job_task.name} does not read it; it reads {known}"
        )


def views_of(job: JobConfig, corpus: str, seed: int) -> dict[str, View]:
    """The views that learners of a job read besides the whole examples, by name.

    Of several tasks, each has its own `corpus`, which has the task's name. Random choices depend on
    the `seed`.
    """
    learners = {learner.form: learner for learner in job.learners.values()}
    tasks = {job_task.name: job_task.task for job_task in tasks_of(job)}
    task = tasks[corpus] if job.data.tasks else next(iter(tasks.values()))
    return {
        form: _view_of(job, learners[form], task, seed)
        for form in sorted(learners.keys() - {DEFAULT_VIEW})
    }


def _view_of(job: JobConfig, learner: LearnerConfig, task: TaskConfig, seed: int) -> View:
    """The view of a learner that does not read whole examples by the job's tokenizer."""
    if learner.tokenizer is None:
        return task.view(learner.view, seed)
    corpus = job.read_by(learner, Corpus.open(job.data.path))
    layout = layout_of(corpus, next(iter(manifest.read(corpus.folder)["tally"]["examples"]))).first
    is_default = learner.view == DEFAULT_VIEW
    view = View(layout.sequences) if is_default else task.view(learner.view, seed)
    first = sum(layout.segments) * (1 + job.tokenizers.index(learner.tokenizer))
    shifted = [[first + number for number in sequence] for sequence in view.sequences]
    return dataclasses.replace(view, sequences=shifted, corpus=corpus)


def predicts_by_example(job: JobConfig) -> bool:
    """Whether the teacher reads an example alike in every epoch, so that it predicts the same."""
    if not job.data.has_examples:
        return False
    read = (views_of(job, corpus, job.seed) for corpus in job.data.tasks or [""])
    masks = [views[job.teacher.form].masks for views in read if job.teacher.form in views]
    return not any(mask.is_redrawn for mask in masks if mask is not None)


def aligns(job: JobConfig, view: str, other: str) -> bool:
    """Whether learners of these views have the same labels, in the same order."""
    return all(job_task.task.aligns(view, other) for job_task in tasks_of(job))


def _at(job_task: TaskOfJob, folder: Path) -> TaskOfJob:
    """The task with the folder that holds its encoded examples."""
    data = dataclasses.replace(job_task.data, path=str(folder))
    return dataclasses.replace(job_task, task=job_task.task.scored_on(folder), data=data)


def _with(job: JobConfig, job_task: TaskOfJob) -> JobConfig:
    """The job with a task as it is now, in place of each learner's, which keeps its weight.

    The heads of frozen teachers get its labels, in its order.
    """

    def renewed(learner: LearnerConfig) -> LearnerConfig:
        if learner.frozen:
            return dataclasses.replace(learner, model=with_labels(learner.model, job_task.task))
        terms = learner.objective.task_terms()
        if job_task.name not in terms:
            return learner
        given = terms[job_task.name]
        task = dataclasses.replace(job_task.task, weight=given.weight, module=given.module)
        return dataclasses.replace(
            learner, objective=learner.objective.with_task(job_task.name, task)
        )

    data = job_task.data
    if isinstance(data, TaskDataConfig):
        data = dataclasses.replace(job.data, tasks={**job.data.tasks, job_task.name: data})
    return dataclasses.replace(
        job,
        data=data,
        teacher=renewed(job.teacher),
        teachers={name: renewed(teacher) for name, teacher in job.teachers.items()},
        students={name: renewed(student) for name, student in job.students.items()},
    )


def _steps(job: JobConfig, examples: Mapping[str, int]) -> int:
    """The steps that read the examples of every task `epochs` times."""
    size = job.batch.at(0).sequences
    assert job.epochs is not None
    assert size is not None
    if job.data.tasks:
        return TaskSchedule(examples, job.seed, size).steps(job.epochs)
    return math.ceil(Fraction(str(job.epochs)) * sum(examples.values()) / size)


def _tokenizer_of(job: JobConfig) -> Path:
    """The folder of the tokenizer that the job's models share."""
    folders = {"data.tokenizer": job.data.tokenizer} | {
        f"{section_of(key)}.init.pretrained": learner.init.pretrained
        for key, learner in job.learners.items()
        if learner.tokenizer is None
    }
    for key, folder in folders.items():
        if folder is not None:
            if not Path(folder).exists():
                why = "no such folder; name one with a tokenizer: none is downloaded"
                raise TrainingError(f"{key}: {folder}: {why}")
            return Path(folder)
    raise TrainingError("data.tokenizer: must be set, because teacher.init.pretrained is not")
