"""The labelled examples of a job's task: encoded once, and used to complete the job's config.

The name of the folder with the encoded examples is a hash of everything that determines its
content: the files, the tokenizer, the task's settings and the code of its module. So jobs with the
same examples share it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from data_pipeline import DEFAULT_VIEW, Corpus, DataError, EncodedExample, ExampleSplit, TextEncoder
from data_pipeline.examples.storing import store_examples
from data_pipeline.shards import manifest
from data_pipeline.tokenization.tokenizer import load as load_tokenizer
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.learner_config import LearnerConfig
from trainer.learner_names import MEAN, TEACHER, section_of
from trainer.objectives.task import Part, TaskConfig, TaskFile
from trainer.objectives.term import TermConfig
from trainer.tasks.soft_labels import SoftLabels

FORMAT = 2  # version of the encoding
FOLDER = "examples"
SOFT = "soft_labels"
SPLITS = {"train": "train", "val": "validation"}  # split of the corpus -> key of the job's file


def with_examples(job: JobConfig) -> JobConfig:
    """The job, completed from its examples: labels, steps, and the folder of encoded examples.

    The examples are encoded unless that has been done before. A job that reads text is returned
    unchanged. Raises DataError, naming file and line, for bad examples, and TrainingError without a
    tokenizer.
    """
    if not job.data.train:
        return job
    name, task = _task_with_labels(job)
    files = job.data.task_files
    splits = {split: files[of] for split, of in SPLITS.items() if of in files}
    folder = _encoded(job, name, task, _tokenizer_of(job), splits, job.data.path)
    job = _with_task(job, name, task)
    data = dataclasses.replace(job.data, path=str(folder))
    steps = job.steps or _steps(job, ExampleSplit(Corpus.open(str(folder)), "train").total)
    job = dataclasses.replace(job, data=data, steps=steps, epochs=None)
    scored_on_test(job)  # so that errors in the test file are raised before training
    return job


def with_validation(job: JobConfig) -> JobConfig:
    """As `with_examples`, for a job that only scores: of its two files the validation file alone is
    encoded, if there is one."""
    files = job.data.task_files
    if "validation" not in files:
        return with_examples(job)
    name, task = _task_with_labels(job)
    folder = _encoded(job, name, task, _tokenizer_of(job), {"val": files["validation"]})
    data = dataclasses.replace(job.data, path=str(folder))
    return dataclasses.replace(_with_task(job, name, task), data=data)


def scored_on_test(job: JobConfig) -> JobConfig | None:
    """The job with its test file as the examples to score; None if it has no test file.

    `job` comes from `with_examples`. The examples are encoded unless that has been done before.
    Raises DataError, naming file and line, for bad examples.
    """
    if not job.data.test:
        return None
    name, task = task_of(job)
    file = job.data.task_files["test"]
    task = task.scored_on(_task_file(job, file, is_scored=True))
    tokenizer = Corpus.open(job.data.path).tokenizer_dir
    folder = _encoded(job, name, task, tokenizer, {"val": file})
    data = dataclasses.replace(job.data, path=str(folder))
    return dataclasses.replace(_with_task(job, name, task), data=data)


def task_of(job: JobConfig) -> tuple[str, TaskConfig]:
    """The task of a job that reads examples, with its name: the first that a learner has."""
    return next(
        (name, section)
        for learner in job.learners.values()
        for name, section in learner.objective.terms().items()
        if isinstance(section, TaskConfig)
    )


def _task_with_labels(job: JobConfig) -> tuple[str, TaskConfig]:
    """The job's task with its name, the labels of its training file, and the file it is scored on.

    Raises DataError and TrainingError as `with_examples`.
    """
    name, task = task_of(job)
    files = job.data.task_files
    if task.needs_validation and "validation" not in files:
        raise DataError(f"data.validation: must be set for {name}")
    _require_files(job, name, task)
    if job.data.max_scored is not None and not task.can_score_some:
        raise DataError(f"data.max_scored: {name} scores whole files only; remove it")
    task = task.with_labels_of(_task_file(job, files["train"], is_scored=False))
    _require_same_labels(job, name, task)
    scored = files.get("validation", files["train"])
    return name, task.scored_on(_task_file(job, scored, is_scored=True))


def _task_file(job: JobConfig, path: Path, *, is_scored: bool) -> TaskFile:
    most = job.data.max_scored if is_scored else None
    return TaskFile(path, job.data.columns, job.data.other_files, most)


def _require_files(job: JobConfig, name: str, task: TaskConfig) -> None:
    """Raise DataError where the task lacks one of its other files, or has one that it ignores."""
    for file in task.reads:
        if file not in job.data.files:
            raise DataError(f"data.files.{file}: must be set for {name}")
    for file in job.data.files.keys() - {*task.reads, *task.may_read}:
        known = ", ".join((*task.reads, *task.may_read)) or "no other files"
        raise DataError(f"data.files.{file}: {name} does not read it; it reads {known}")


def views_of(job: JobConfig) -> dict[str, tuple[int, ...]]:
    """The views that learners of a job read besides the whole examples: the segments of each."""
    names = {one.view for one in job.learners.values()} - {DEFAULT_VIEW}
    return {name: task_of(job)[1].segments_of(name) for name in sorted(names)}


def _with_task(job: JobConfig, name: str, task: TaskConfig) -> JobConfig:
    """The job with `task` instead of each learner's own section of it, except for the weight."""

    def renewed(learner: LearnerConfig) -> LearnerConfig:
        terms = learner.objective.terms()
        sections: dict[str, TermConfig] = {}
        if name in terms:
            sections[name] = dataclasses.replace(task, weight=terms[name].weight)
        soft = terms.get(SOFT)
        if isinstance(soft, SoftLabels):
            sections[SOFT] = dataclasses.replace(soft, task=name)
        objective = dataclasses.replace(learner.objective, **sections)
        return dataclasses.replace(learner, objective=objective)

    students = {student: renewed(learner) for student, learner in job.students.items()}
    return dataclasses.replace(job, teacher=renewed(job.teacher), students=students)


def _require_same_labels(job: JobConfig, name: str, task: TaskConfig) -> None:
    """Raise TrainingError if a frozen teacher's head is missing or has other labels.

    A further teacher needs the head only where a student reads its predictions.
    """
    soft = [one.objective.terms().get(SOFT) for one in job.students.values()]
    read = {TEACHER, *(one.source for one in soft if one is not None)}
    for teacher, config in job.learners.items():
        if not config.frozen or (teacher not in read and MEAN not in read):
            continue
        where = f"{section_of(teacher)}.init.pretrained"
        theirs = config.model.task_heads.get(name)
        ours = task.equip(config.model).task_heads[name]
        if theirs is None:
            raise TrainingError(f"{where}: it has no head for {name}; fine-tune it first")
        if theirs.labels != ours.labels:
            raise TrainingError(
                f"{where}: its head tells {', '.join(theirs.labels)}, "
                f"but the labels of the examples are {', '.join(ours.labels)}"
            )


def _steps(job: JobConfig, examples: int) -> int:
    """The steps that read this many examples `epochs` times."""
    size = job.batch.at(0).sequences
    assert job.epochs is not None
    assert size is not None
    return math.ceil(job.epochs * examples / size)


def _encoded(
    job: JobConfig,
    name: str,
    task: TaskConfig,
    tokenizer: Path,
    files: Mapping[str, Path],
    path: str = "",
) -> Path:
    """The folder of encoded examples from `files`, by split; encodes them if necessary.

    The folder is `path` or, if that is empty, one beside the runs that is named by its content.
    """
    fingerprint = load_tokenizer(tokenizer)[1].fingerprint
    identity = {"format": FORMAT, "tokenizer": fingerprint, **_identity(job, task, files)}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(path or f"{job.output_dir}/{FOLDER}/{digest}/{name}")
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        encoder = TextEncoder(tokenizer, job.data.sequence_length)
        store_examples(folder, encoder, tokenizer, identity, _examples(job, task, encoder, files))
    elif manifest.read(folder)["identity"] != identity:
        raise DataError(f"data.path: {folder} holds other examples; name another, or leave it out")
    return folder


def _identity(job: JobConfig, task: TaskConfig, files: Mapping[str, Path]) -> dict[str, Any]:
    """Everything except the tokenizer that determines the encoded examples."""
    data, settings = job.data, dataclasses.asdict(task)
    return {
        "settings": {key: one for key, one in settings.items() if key not in task.not_encoded},
        "code": _content(Path(inspect.getfile(type(task)))),
        "files": {SPLITS[split]: _content(path) for split, path in files.items()},
        "others": {other: _content(path) for other, path in data.other_files.items()},
        "max_scored": data.max_scored,
        "columns": dict(data.columns),
        "sequence_length": data.sequence_length,
        "validation_fraction": None if data.validation else data.validation_fraction,
    }


def _examples(
    job: JobConfig, task: TaskConfig, encoder: TextEncoder, files: Mapping[str, Path]
) -> dict[str, Iterable[EncodedExample]]:
    """The examples by split; without a validation file, a part of the training file is held out."""
    every = None if "val" in files else round(1 / job.data.validation_fraction)
    return {
        split: task.encode_part(
            _task_file(
                job,
                files[split if every is None else "train"],
                is_scored=every is None and split == "val",
            ),
            encoder,
            Part(is_held_out=split == "val", every=every),
        )
        for split in (files if every is None else SPLITS)
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


def _content(path: Path) -> str:
    """The SHA-256 of a file."""
    try:
        return manifest.sha256(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
