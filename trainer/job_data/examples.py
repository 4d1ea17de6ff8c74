"""The labelled examples of a job's tasks: encoded once, and used to complete the job's config."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
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
from data_pipeline.shards import manifest
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.job_data.encoding import SPLITS, TaskOfJob, encoded
from trainer.job_data.task_heads import require_same_labels, with_labels
from trainer.learner_config import LearnerConfig
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
    for one in tasks_of(job):
        ready = _ready(job, one, tokenizer, renewable)
        totals[one.name] = ExampleSplit(Corpus.open(ready.data.path), "train").total
        job = _with(job, ready)
    steps = job.steps or _steps(job, totals)
    job = dataclasses.replace(job, steps=steps, epochs=None)
    scored_on_test(job)  # so that errors in a test file are raised before training
    return job


def with_validation(job: JobConfig) -> JobConfig:
    """As `with_examples`, for a job that only scores: it encodes the validation files alone."""
    tasks = tasks_of(job)
    if not all("validation" in one.data.task_files for one in tasks):
        return with_examples(job)
    tokenizer = _tokenizer_of(job)
    for one in tasks:
        ready = _with_labels(job, one)
        files = {"val": ready.file("validation").path}
        job = _with(job, _at(ready, encoded(job, ready, tokenizer, files)))
    return job


def tasks_of(job: JobConfig) -> list[TaskOfJob]:
    """The tasks of a job that reads examples, each as the first learner that has it declares it."""
    found: dict[str, TaskConfig] = {}
    for learner in job.learners.values():
        for name, task in learner.objective.task_terms().items():
            found.setdefault(name, task)
    if not job.data.tasks:
        return [TaskOfJob(name, task, job.data) for name, task in found.items()]
    return [TaskOfJob(name, found[name], data) for name, data in job.data.examples_of.items()]


def scored_on_test(job: JobConfig) -> JobConfig | None:
    """The job with its test files as the examples to score; None if it has no test file.

    `job` comes from `with_examples`. Tasks without a test file keep their examples. The others' are
    encoded unless that has been done before. Raises DataError, naming file and line, for bad ones.
    """
    tested = [one for one in tasks_of(job) if one.data.test]
    for one in tested:
        tokenizer = Corpus.open(one.data.path).tokenizer_dir
        own = dataclasses.replace(one, data=dataclasses.replace(one.data, path=""))
        try:
            folder = encoded(job, own, tokenizer, {"val": one.file("test").path})
        except DataError as error:
            other = f"or leave {one.key}.test out: `tandem predict` reads files without labels"
            raise DataError(f"{error}; {other}") from None
        job = _with(job, _at(own, folder))
    return job if tested else None


def test_contents(job: JobConfig) -> dict[str, str]:
    """What identifies the examples in each task's test file, by task; see `scored_on_test`."""
    scored = scored_on_test(job)
    tested = [one for one in tasks_of(scored) if one.data.test] if scored else []
    return {one.name: Corpus.open(one.data.path).content for one in tested}


def _ready(
    job: JobConfig, one: TaskOfJob, tokenizer: Path, renewable: Collection[str]
) -> TaskOfJob:
    """The task, completed from its files, with its examples encoded."""
    one = _with_labels(job, one)
    files = one.data.task_files
    splits = {split: files[of] for split, of in SPLITS.items() if of in files}
    folder = encoded(job, one, tokenizer, splits, renewable)
    if "val" not in splits and "val" not in manifest.read(folder)["tally"]["examples"]:
        raise DataError(
            f"{one.key}.validation: must be set; {files['train']} has too few examples to hold "
            f"some of them out (or raise {one.key}.validation_fraction)"
        )
    one = _at(one, folder)
    trained = ExampleSplit(Corpus.open(one.data.path), "train")
    return dataclasses.replace(one, task=one.task.trained_on(trained))


def _with_labels(job: JobConfig, one: TaskOfJob) -> TaskOfJob:
    """The task with the labels of its training file.

    Raises DataError and TrainingError as `with_examples`.
    """
    files = one.data.task_files
    if one.task.needs_validation and "validation" not in files:
        raise DataError(f"{one.key}.validation: must be set for {one.name}")
    _require_files(one)
    for key in ("max_trained", "max_scored"):
        if getattr(one.data, key) is not None and not one.task.can_read_some:
            raise DataError(f"{one.key}.{key}: {one.name} reads whole files only; remove it")
    task = one.task.with_labels_of(one.file("train"))
    require_same_labels(job, task)
    return dataclasses.replace(one, task=task)


def _require_files(one: TaskOfJob) -> None:
    """Raise DataError where the task lacks one of its other files, or has one that it ignores."""
    task, there = one.task, one.data.files
    for file in task.reads:
        if file not in there:
            raise DataError(f"{one.key}.files.{file}: must be set for {one.name}")
    for file in there.keys() - {*task.reads, *task.may_read}:
        known = ", ".join((*task.reads, *task.may_read)) or "no other files"
        raise DataError(f"{one.key}.files.{file}: {one.name} does not read it; it reads {known}")


def views_of(job: JobConfig, corpus: str, seed: int) -> dict[str, View]:
    """The views that learners of a job read besides the whole examples, by name.

    Of several tasks, each has its own `corpus`, which has the task's name. Random choices depend on
    the `seed`.
    """
    names = {one.view for one in job.learners.values()} - {DEFAULT_VIEW}
    tasks = {one.name: one.task for one in tasks_of(job)}
    task = tasks[corpus] if job.data.tasks else next(iter(tasks.values()))
    return {name: task.view(name, seed) for name in sorted(names)}


def predicts_by_example(job: JobConfig) -> bool:
    """Whether the teacher reads an example alike in every epoch, so that it predicts the same."""
    if not job.data.has_examples:
        return False
    read = (views_of(job, corpus, job.seed) for corpus in job.data.tasks or [""])
    masks = [views[job.teacher.view].masks for views in read if job.teacher.view in views]
    return not any(mask.is_redrawn for mask in masks if mask is not None)


def aligns(job: JobConfig, view: str, other: str) -> bool:
    """Whether learners of these views have the same labels, in the same order."""
    return all(one.task.aligns(view, other) for one in tasks_of(job))


def _at(one: TaskOfJob, folder: Path) -> TaskOfJob:
    """The task with the folder that holds its encoded examples."""
    data = dataclasses.replace(one.data, path=str(folder))
    return dataclasses.replace(one, task=one.task.scored_on(folder), data=data)


def _with(job: JobConfig, one: TaskOfJob) -> JobConfig:
    """The job with a task as it is now, in place of each learner's, which keeps its weight.

    The heads of frozen teachers get its labels, in its order.
    """

    def renewed(learner: LearnerConfig) -> LearnerConfig:
        if learner.frozen:
            return dataclasses.replace(learner, model=with_labels(learner.model, one.task))
        terms = learner.objective.task_terms()
        if one.name not in terms:
            return learner
        given = terms[one.name]
        task = dataclasses.replace(one.task, weight=given.weight, module=given.module)
        return dataclasses.replace(learner, objective=learner.objective.with_task(one.name, task))

    data = one.data
    if isinstance(data, TaskDataConfig):
        data = dataclasses.replace(job.data, tasks={**job.data.tasks, one.name: data})
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
    return math.ceil(job.epochs * sum(examples.values()) / size)


def _tokenizer_of(job: JobConfig) -> Path:
    """The folder of the tokenizer that the job's models share."""
    folders = [job.data.tokenizer, *(one.init.pretrained for one in job.learners.values())]
    folder = next((one for one in folders if one is not None), None)
    if folder is None:
        raise TrainingError("data.tokenizer: must be set where teacher.init.pretrained is not")
    if not Path(folder).exists():
        raise TrainingError(f"{folder}: no such folder; it should hold the tokenizer")
    return Path(folder)
