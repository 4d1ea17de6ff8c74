"""The labelled examples of a job's tasks: encoded once, and used to complete the job's config.

The name of the folder with the encoded examples is a hash of everything that determines its
content: the files, the tokenizer, the task's settings and the code of its module. So jobs with the
same examples share it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.durations import counted
from configs.progress import tracked
from configs.typed import nearest_of_all
from data_pipeline import (
    DEFAULT_VIEW,
    Corpus,
    DataConfig,
    DataError,
    ExampleSplit,
    TaskDataConfig,
    TaskSchedule,
    TextEncoder,
    View,
)
from data_pipeline.examples.reading import layout_of
from data_pipeline.examples.storing import store_examples
from data_pipeline.shards import manifest
from data_pipeline.tokenization.tokenizer import digest as tokenizer_digest
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.job_data.digests import digest_of, watch
from trainer.job_data.task_heads import (
    require_labels_of_kind,
    require_same_labels,
    with_labels,
)
from trainer.learner_config import LearnerConfig
from trainer.objectives.task import Part, TaskConfig, TaskFile

_log = logging.getLogger(__name__)

FORMAT = 7  # version of the shipped tasks' encodings, and of what is held out
SHIPPED = "trainer.tasks."  # modules whose encoding `FORMAT` is about
FOLDER = "examples"
SPLITS = {"train": "train", "val": "validation"}  # split of the corpus -> key of the job's file


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
        job = _with(job, _at(ready, _encoded(job, ready, tokenizer, files)))
    return job


@dataclass(frozen=True)
class TaskOfJob:
    """A task of a job: its name in objectives, its section there, and its examples."""

    name: str
    task: TaskConfig
    data: DataConfig | TaskDataConfig  # of several tasks: the task's own, complete

    @property
    def key(self) -> str:
        """The key of the section that names its examples."""
        return "data" if isinstance(self.data, DataConfig) else f"data.tasks.{self.name}"

    @property
    def path_key(self) -> str:
        """The key of the folder that holds its encoded examples."""
        return f"{self.key}.path"

    def file(self, split: str) -> TaskFile:
        """The file of a split that is named."""
        return self.task_file(self.data.task_files[split], is_scored=False)

    def task_file(self, path: Path, *, is_scored: bool) -> TaskFile:
        """A file of its examples, to train or to be scored on.

        Raises DataError where the section names the column of a field that the task does not have.
        """
        _require_fields(self)
        most = self.data.max_scored if is_scored else self.data.max_trained
        data = self.data
        return TaskFile(path, data.columns, data.other_files, most, data.encoding)


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
            folder = _encoded(job, own, tokenizer, {"val": one.file("test").path})
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
    folder = _encoded(job, one, tokenizer, splits, renewable)
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


def _require_fields(one: TaskOfJob) -> None:
    """Raise DataError for a column of a field that the task does not have: it has no effect."""
    fields = one.task.placed_fields
    for name in one.data.columns:
        if name not in fields:
            why = nearest_of_all(name, fields) or f"; {one.name} has none, so remove it"
            raise DataError(f"{one.key}.columns.{name}: no such field{why}")


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


def _encoded(
    job: JobConfig,
    one: TaskOfJob,
    tokenizer: Path,
    files: Mapping[str, Path],
    renewable: Collection[str] = (),
) -> Path:
    """The folder of the encoded examples in `files`, by split, which exists afterwards.

    It is the `path` of the section; empty: one beside the runs, named after its content. See
    `with_examples` for `renewable`.
    """
    assert one.data.sequence_length is not None
    encoder = TextEncoder(tokenizer, one.data.sequence_length)
    require_unchanged = watch(files_of(one, files))  # hashed in the next line, read below
    identity = {
        "format": FORMAT,
        "tokenizer": tokenizer_digest(encoder.tokenizer),
        **_identity(one, files),
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    own = Path(f"{job.output_dir}/{FOLDER}/{digest}/{one.name}")
    folder = Path(one.data.path or own)
    if one.path_key in renewable and not _holds(folder, identity):
        folder = own
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        examples = {
            split: tracked(
                one.task.encode_part(file, encoder, part), f"encoding {file.path}", "examples"
            )
            for split, (file, part) in _parts(one, files).items()
        }

        def references() -> Any:  # the last that is read
            compared = one.task.references(*_parts(one, files)["val"])
            require_unchanged()
            return compared

        store_examples(folder, encoder, tokenizer, identity, examples, references)
        if encoder.cut:
            where = f"{one.key}.sequence_length: {one.data.sequence_length}"
            _log.warning(
                "%s cuts %s: the part that is cut is neither read nor scored",
                where,
                counted(len(encoder.cut), "text"),
            )
    elif not _holds(folder, identity):
        raise DataError(
            f"{one.path_key}: {folder} holds other examples; name another, or leave it empty"
        )
    layout = layout_of(Corpus.open(str(folder)), next(iter(files)))
    require_labels_of_kind(job, one.task, layout)
    return folder


def _holds(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Whether a folder has the encoded examples of this identity."""
    return folder.exists() and identity.items() <= manifest.read(folder)["identity"].items()


def _identity(one: TaskOfJob, files: Mapping[str, Path]) -> dict[str, Any]:
    """All but the tokenizer and `FORMAT` that decides what the encoded examples are.

    A plugin has no `FORMAT`: its file stands for it.
    """
    data, task, settings = one.data, one.task, dataclasses.asdict(one.task)
    changed = {key: getattr(data, key) for key in data.changed("max_trained", "encoding")}
    own = type(task).__module__.startswith(SHIPPED)
    code = {} if own else {"code": digest_of(Path(inspect.getfile(type(task))))}
    return {
        **changed,
        **code,
        "settings": {key: settings[key] for key in settings if key not in task.not_encoded},
        "files": {SPLITS[split]: _digest(task, path) for split, path in files.items()},
        "others": {other: digest_of(path) for other, path in data.other_files.items()},
        "max_scored": data.max_scored,
        "columns": dict(data.columns),
        "sequence_length": data.sequence_length,
        "validation_fraction": None if data.validation else data.validation_fraction,
    }


def _digest(task: TaskConfig, path: Path) -> str:
    """The SHA-256 of the examples at a path."""
    digests = [digest_of(one) for one in task.files_of(path)]
    whole = hashlib.sha256("".join(digests).encode()).hexdigest()
    return digests[0] if len(digests) == 1 else whole


def _parts(one: TaskOfJob, files: Mapping[str, Path]) -> dict[str, tuple[TaskFile, Part]]:
    """The file of each split, and the part of it: without one for "val", some of "train"'s."""
    fraction = None if "val" in files else one.data.validation_fraction
    return {
        split: (
            one.task_file(
                files[split if fraction is None else "train"],
                is_scored=fraction is None and split == "val",
            ),
            Part(is_held_out=split == "val", fraction=fraction),
        )
        for split in (files if fraction is None else SPLITS)
    }


def _tokenizer_of(job: JobConfig) -> Path:
    """The folder of the tokenizer that the job's models share."""
    folders = [job.data.tokenizer, *(one.init.pretrained for one in job.learners.values())]
    folder = next((one for one in folders if one is not None), None)
    if folder is None:
        raise TrainingError("data.tokenizer: must be set where teacher.init.pretrained is not")
    if not Path(folder).exists():
        raise TrainingError(f"{folder}: no such folder; it should hold the tokenizer")
    return Path(folder)


def files_of(one: TaskOfJob, files: Mapping[str, Path]) -> list[Path]:
    """The files with the examples of these splits, and the task's other files."""
    examples = (path for split in files.values() for path in one.task.files_of(split))
    return [*examples, *one.data.other_files.values()]
