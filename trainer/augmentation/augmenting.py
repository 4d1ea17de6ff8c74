"""More examples of a task in a table: the given ones, each followed by its copies.

The table is made in parts, so that an interrupted call can be resumed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from configs.durable import atomic_file, atomic_write
from configs.errors import OptionError
from configs.progress import tracked
from data_pipeline import DataError
from data_pipeline.augmentation.perturbation import Lexicon, Perturbation, Tagger, tagged, untagged
from data_pipeline.shards import manifest
from data_pipeline.shards.locking import exclusive
from data_pipeline.task_files.conll import LAST
from data_pipeline.task_files.contents import UTF_8, Dropped
from data_pipeline.task_files.tables import Columns
from data_pipeline.text.sentences import spaceless_share
from data_pipeline.tokenization.tokenizer import load
from trainer.config import JobConfig
from trainer.job_data.encoding import digest_of, watch
from trainer.job_data.examples import tasks_of
from trainer.objectives.task import LABEL

SUFFIX = ".tsv"
IDENTITY = "identity.json"


class TableFile:
    """A table whose rows come in parts; each that is written stays, and the next run skips it.

    `columns` say where each field stands, by name or number, as in the table that it extends. What
    it is made of, `identity`, must be the same when it is resumed. A part begins with its SHA-256,
    so that a damaged one is made again.
    """

    def __init__(self, path: Path, columns: Columns, identity: Mapping[str, Any]) -> None:
        self.path, self._columns, self._identity = path, columns, identity
        self._parts = path.with_name(f".{path.name}.part")
        self._record = path.with_name(f"{path.name}.json")

    @classmethod
    @contextmanager
    def opened(
        cls, path: Path, columns: Columns, identity: Mapping[str, Any]
    ) -> Iterator[TableFile]:
        """The table, which no other process writes meanwhile.

        Raises DataError where another does, or where the file was made or begun of something else.
        """
        if path.suffix != SUFFIX:
            raise OptionError(f"--out {path}: must end in {SUFFIX}: it is a table with tabs")
        table = cls(path, columns, identity)
        busy = f"{path}: another process is writing it; wait for it, or name another file"
        with exclusive(table._parts, busy):
            try:
                table._begin()
                yield table
            finally:
                if not (table._parts / IDENTITY).exists():
                    shutil.rmtree(table._parts, ignore_errors=True)

    def _begin(self) -> None:
        if self.path.exists():
            if self.finished_rows() is None:
                raise DataError(f"{self.path}: exists; delete it, or name another --out")
            (self._parts / IDENTITY).unlink(missing_ok=True)  # a clean-up was interrupted
            return
        begun = self._parts / IDENTITY
        text = json.dumps(self._identity, indent=2, sort_keys=True)
        try:
            if not begun.exists():  # a table was finished, and its parts were not all removed
                for left in self._parts.glob(f"*{SUFFIX}"):
                    left.unlink()
                atomic_write(begun, text)
            is_same = begun.read_bytes() == text.encode()
        except OSError as error:
            raise DataError(f"{self.path}: cannot be written: {error.strerror}") from None
        if not is_same:
            raise DataError(
                f"{self.path}: was begun with other examples or settings; repeat the command "
                f"with those, or delete {self._parts}"
            )

    def finished_rows(self) -> int | None:
        """The number of rows of the finished table; None where it is not there, or another."""
        if not (self.path.is_file() and self._record.is_file()):
            return None
        with open(self.path, "rb") as file:
            rows = sum(1 for _ in file) - bool(self._header)
        record = self._record_of(rows, manifest.sha256(self.path))
        return rows if self._record.read_bytes() == record.encode() else None

    def has(self, part: int) -> bool:
        """Whether a part is written, and undamaged."""
        return self._rows_of(part) is not None

    def write(self, part: int, rows: Iterable[Mapping[str, str]]) -> None:
        """Write a part: rows of values by field."""
        content = "".join(f"{self._line(row)}\n" for row in rows).encode()
        atomic_write(self._name(part), _digest_line(content) + content)

    def finish(self, parts: int) -> int:
        """Join the parts, with a header where columns have names; the number of their rows."""
        digest, rows = hashlib.sha256(self._header), 0
        with atomic_file(self.path) as file:
            file.write(self._header)
            for part in range(parts):  # one at a time, as the table may not fit into memory
                content = self._rows_of(part)
                if content is None:
                    raise DataError(f"{self._name(part)}: is damaged; repeat the command")
                file.write(content)
                digest.update(content)
                rows += content.count(b"\n")
            # Before the table has its name: a finished table is known by its record.
            atomic_write(self._record, self._record_of(rows, digest.hexdigest()))
        (self._parts / IDENTITY).unlink()
        return rows

    def _record_of(self, rows: int, digest: str) -> str:
        tree = {**self._identity, "rows": rows, "sha256": digest}
        return json.dumps(tree, indent=2, sort_keys=True)

    def _rows_of(self, part: int) -> bytes | None:
        """The lines of a part; None where it is not there, or damaged."""
        try:
            digest, _, content = self._name(part).read_bytes().partition(b"\n")
        except OSError:
            return None
        return content if digest + b"\n" == _digest_line(content) else None

    @property
    def _header(self) -> bytes:
        return (
            b"" if self._numbered else ("\t".join(map(str, self._columns.values())) + "\n").encode()
        )

    @property
    def _numbered(self) -> bool:
        return any(isinstance(column, int) for column in self._columns.values())

    def _line(self, row: Mapping[str, str]) -> str:
        cells = {field: re.sub(r"\s", " ", text) for field, text in row.items()}
        if not self._numbered:
            return "\t".join(cells[field] for field in self._columns)
        places = {int(column): field for field, column in self._columns.items()}
        numbers = range(1, max(places) + 1)
        return "\t".join(cells[places[n]] if n in places else "-" for n in numbers)

    def _name(self, part: int) -> Path:
        return self._parts / f"{part:06d}{SUFFIX}"


def _digest_line(content: bytes) -> bytes:
    return f"{hashlib.sha256(content).hexdigest()}\n".encode()


PART = 64  # examples that are written at a time
PARTS = f"parts of {PART:,} examples"
Row = Mapping[str, str]


# Yields each row, then its copies; the number is that of the first row.
Copies = Callable[[Sequence[Row], int], Iterator[Row]]


class Method(Protocol):
    """A way to make copies, with its settings."""

    @property
    def files(self) -> Sequence[Path]:
        """The files and folders that `over` reads."""

    def identity(self) -> dict[str, Any]:
        """Plain values that are equal for equal results; DataError for a file that is not there."""

    def over(self, rows: Sequence[Row], texts: Sequence[str], device: torch.device) -> Copies:
        """The maker of the copies of these examples, whose `texts` are these fields."""


def augment(job: JobConfig, method: Method, out: Path, device: torch.device) -> tuple[int, int]:
    """Write the training examples of a task with their copies to `out`; how many, and of how many.

    `job` is about one task. An interrupted call is resumed by the same call. Raises DataError or
    ModelError, one line, for a task that is not about texts in tables, or has no validation file,
    and for bad inputs.
    """
    (job_task,) = tasks_of(job)
    name, task = job_task.name, job_task.task
    if LABEL not in task.fields:
        raise DataError(
            f"{name}: does not read texts from tables; only such tasks can be augmented"
        )
    if not job.data.validation:
        raise DataError(
            "data.validation: must be set, because no part of augmented examples can be held out: "
            "copies of it would stay in the rest"
        )
    file = job_task.file("train")
    columns = file.columns_of(*task.placed_fields)
    require_unchanged = watch([*method.files, file.path])  # hashed here, read below
    identity = {**method.identity(), "examples": digest_of(file.path), "columns": columns}
    if file.most is not None:
        identity["first"] = file.most
    with TableFile.opened(out, columns, identity) as table:
        dropped = Dropped()
        read = task.rows(file, *task.placed_fields, dropped=dropped)
        rows = [row for _, row in file.first(read)]
        dropped.tell(file.path)
        if (made := table.finished_rows()) is not None:
            return made, len(rows)
        copies = method.over(rows, task.texts, device)
        require_unchanged()
        parts = range(0, len(rows), PART)
        for part, first in enumerate(tracked(parts, "augmenting", PARTS, len(parts))):
            if not table.has(part):
                some = rows[first : first + PART]
                table.write(part, copies(some, first))
        return table.finish(len(parts)), len(rows)


_log = logging.getLogger(__name__)


def mask_token(tokenizer_dir: str | None) -> str | None:
    """The mask token of the tokenizer in a folder; None without a folder."""
    if tokenizer_dir is None:
        return None
    tokenizer, vocabulary = load(Path(tokenizer_dir))
    return tokenizer.id_to_token(vocabulary.mask)


@dataclass(frozen=True)
class TaggedFile:
    """A file of words with their parts of speech, in this column of CoNLL's; -1: the last."""

    path: Path
    column: int = LAST
    encoding: str = UTF_8

    def identity(self) -> dict[str, Any]:
        """Plain values that are equal for equal tags; DataError for a file that is not there."""
        return {"content": digest_of(self.path), "column": self.column, "encoding": self.encoding}


@dataclass(frozen=True)
class Perturbing:
    """The settings, and the file from which parts of speech are learnt.

    Without a file no word is replaced: `perturbation.replace` must be 0.
    """

    perturbation: Perturbation
    tagged: TaggedFile | None = None

    def identity(self) -> dict[str, Any]:
        """Plain values that are equal for equal results; DataError for a file that is not there."""
        values = dataclasses.asdict(self.perturbation)
        return values if self.tagged is None else {**values, "tagged": self.tagged.identity()}

    @property
    def files(self) -> Sequence[Path]:
        """The files and folders that `over` reads."""
        return [] if self.tagged is None else [self.tagged.path]

    def over(self, rows: Sequence[Row], texts: Sequence[str], device: torch.device) -> Copies:
        """The maker of the copies; learns to tag words, and counts those of all examples by tag."""
        file = self.tagged
        tags_of = (
            untagged if file is None else Tagger.learn(file.path, file.column, file.encoding).tags
        )
        words = {field: [row[field] for row in rows] for field in texts}
        if spaceless := spaceless_share(text for some in words.values() for text in some):
            share, script = spaceless
            _log.warning(
                "%.0f%% of the letters have no spaces between words (%s): what stands between "
                "spaces is masked as one word; put spaces between the words",
                100 * share,
                script,
            )
        tags = {field: tags_of(column) for field, column in words.items()}
        counted = (pair for field in texts for pair in tagged(words[field], tags[field]))
        by_example, lexicon = list(zip(*tags.values(), strict=True)), Lexicon(counted)

        def copies(rows: Sequence[Row], first: int) -> Iterator[Row]:
            for number, row in enumerate(rows, first):
                yield row
                given = [row[field] for field in texts]
                for copy in self.perturbation.copies_of(given, by_example[number], lexicon, number):
                    yield {**row, **dict(zip(texts, copy, strict=True))}

        return copies
