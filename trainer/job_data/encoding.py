"""Encoding the examples of a task once, in a folder whose name is a hash of what they are made of.

That is all that determines their content: the files, the tokenizer, the task's settings and the
code of its module. So jobs with the same examples share it.
"""

import dataclasses
import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.progress import counted, tracked
from configs.typed import nearest_of_all
from data_pipeline import Corpus, DataConfig, DataError, EncodedExample, TaskDataConfig, TextEncoder
from data_pipeline.examples.reading import layout_of
from data_pipeline.examples.storing import store_examples
from data_pipeline.shards import manifest
from data_pipeline.text.text_files import refuse_pipe
from data_pipeline.tokenization.tokenizer import digest as tokenizer_digest
from trainer.config import JobConfig
from trainer.job_data.task_heads import require_labels_of_kind
from trainer.objectives.task import Part, TaskConfig, TaskFile


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, or of the names and contents in a folder; DataError if unreadable."""
    refuse_pipe(path)
    try:
        if not path.is_dir():
            return manifest.sha256(path)
        files = sorted(file for file in path.rglob("*") if file.is_file())
        digests = [(str(file.relative_to(path)), manifest.sha256(file)) for file in files]
        return hashlib.sha256(json.dumps(digests).encode()).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def watch(paths: Iterable[Path]) -> Callable[[], None]:
    """A function that raises DataError for the first of these files that has changed since now.

    A file that was put back has changed, too: the time of an inode's last change cannot be set.
    """
    before = {path: _state_of(path) for path in paths}

    def require_unchanged() -> None:
        for path, state in before.items():
            if _state_of(path) != state:
                raise DataError(f"{path}: was changed while it was read; repeat the command")

    return require_unchanged


def _state_of(path: Path) -> list[tuple[str, int, int, int]]:
    """The inodes, sizes and times of change of a file, or of all files in a folder."""
    try:
        files = [file for file in sorted(path.rglob("*")) if file.is_file()]
        states = [(str(file), file.stat()) for file in (files if path.is_dir() else [path])]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return [(name, state.st_ino, state.st_size, state.st_ctime_ns) for name, state in states]


_log = logging.getLogger(__name__)

FORMAT = 9  # version of the shipped tasks' encodings, and of what is held out
SHIPPED = "trainer.tasks."  # modules whose encoding `FORMAT` is about
FOLDER = "examples"
SPLITS = {"train": "train", "val": "validation"}  # split of the corpus -> key of the job's file


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


def encoded(
    job: JobConfig,
    job_task: TaskOfJob,
    tokenizer: Path,
    files: Mapping[str, Path],
    renewable: Collection[str] = (),
) -> Path:
    """The folder of the encoded examples in `files`, by split, which exists afterwards.

    It is the `path` of the section; empty: one beside the runs, named after its content. One at a
    key among `renewable` that holds other examples gives way to that. Raises DataError.
    """
    assert job_task.data.sequence_length is not None
    folders = [tokenizer, *map(Path, job.tokenizers)]
    encoders = [TextEncoder(folder, job_task.data.sequence_length) for folder in folders]
    require_unchanged = watch(files_of(job_task, files))  # hashed in the next line, read below
    identity = _identity(job_task, files, encoders)
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    named_by_content = Path(f"{job.output_dir}/{FOLDER}/{digest}/{job_task.name}")
    folder = Path(job_task.data.path or named_by_content)
    if job_task.path_key in renewable and not _holds(folder, identity):
        folder = named_by_content
    if not folder.exists():
        _encode(job_task, folder, encoders, identity, files, require_unchanged)
    elif not _holds(folder, identity):
        raise DataError(
            f"{job_task.path_key}: {folder} holds other examples; name another, or leave it empty"
        )
    layout = layout_of(Corpus.open(str(folder)), next(iter(files)))
    require_labels_of_kind(job, job_task.task, layout)
    return folder


def _encode(
    job_task: TaskOfJob,
    folder: Path,
    encoders: Sequence[TextEncoder],
    identity: Mapping[str, Any],
    files: Mapping[str, Path],
    require_unchanged: Callable[[], None],
) -> None:
    """Write the encoded examples in `files` to `folder`, unless a file changes meanwhile."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    parts = _parts(job_task, files)
    examples = {
        split: tracked(
            _by_all(job_task.task, file, encoders, part), f"encoding {file.path}", "examples"
        )
        for split, (file, part) in parts.items()
    }

    def references() -> Any:  # the last that is read
        compared = job_task.task.references(*parts["val"])
        require_unchanged()
        return compared

    first, *others = encoders
    store_examples(folder, first, first.tokenizer_dir, identity, examples, references, others)
    for encoder in encoders:
        if encoder.cut:
            _log.warning(
                "%s.sequence_length: %s cuts %s%s: the part that is cut is neither read nor scored",
                job_task.key,
                job_task.data.sequence_length,
                counted(len(encoder.cut), "text"),
                f" as {encoder.tokenizer_dir} reads them" if others else "",
            )


def _by_all(
    task: TaskConfig, file: TaskFile, encoders: Sequence[TextEncoder], part: Part
) -> Iterator[EncodedExample]:
    """The examples of a part of a file, each as all `encoders` read it.

    A text that has no tokens for one of them is an error, as for one encoder alone, so that no
    example moves.
    """
    forms = (task.encode_part(file, encoder, part) for encoder in encoders)
    return map(EncodedExample.joined, zip(*forms, strict=True))


def _holds(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Whether a folder has the encoded examples of this identity."""
    return folder.exists() and identity.items() <= manifest.read(folder)["identity"].items()


def _identity(
    job_task: TaskOfJob, files: Mapping[str, Path], encoders: Sequence[TextEncoder]
) -> dict[str, Any]:
    """All that decides what the encoded examples are.

    A plugin has no `FORMAT`: its file stands for it.
    """
    data, task, settings = job_task.data, job_task.task, dataclasses.asdict(job_task.task)
    changed = {key: getattr(data, key) for key in data.changed("max_trained", "encoding")}
    is_shipped = type(task).__module__.startswith(SHIPPED)
    digests = [tokenizer_digest(encoder.tokenizer) for encoder in encoders]
    code = {} if is_shipped else {"code": digest_of(Path(inspect.getfile(type(task))))}
    return {
        "format": FORMAT,
        "tokenizer": digests[0],
        **({"tokenizers": digests[1:]} if digests[1:] else {}),
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
    digests = [digest_of(file) for file in task.files_of(path)]
    joined = hashlib.sha256("".join(digests).encode()).hexdigest()
    return digests[0] if len(digests) == 1 else joined


def _parts(job_task: TaskOfJob, files: Mapping[str, Path]) -> dict[str, tuple[TaskFile, Part]]:
    """The file of each split, and the part of it: without one for "val", some of "train"'s."""
    if "val" not in files:
        train = job_task.task_file(files["train"], is_scored=False)
        fraction = job_task.data.validation_fraction
        return {split: (train, Part(split == "val", fraction)) for split in SPLITS}
    return {
        split: (job_task.task_file(path, is_scored=split == "val"), Part(split == "val"))
        for split, path in files.items()
    }


def _require_fields(job_task: TaskOfJob) -> None:
    """Raise DataError for a column of a field that the task does not have: it has no effect."""
    fields = job_task.task.placed_fields
    for name in job_task.data.columns:
        if name not in fields:
            why = nearest_of_all(name, fields) or f"; {job_task.name} has none, so remove it"
            raise DataError(f"{job_task.key}.columns.{name}: no such field{why}")


def files_of(job_task: TaskOfJob, files: Mapping[str, Path]) -> list[Path]:
    """The files with the examples of these splits, and the task's other files."""
    examples = (path for split in files.values() for path in job_task.task.files_of(split))
    return [*examples, *job_task.data.other_files.values()]
