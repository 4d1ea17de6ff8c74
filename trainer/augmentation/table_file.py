"""The file of augmented examples: a table with tabs, made in parts so that it can be resumed."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from data_pipeline import DataError
from data_pipeline.task_files.tables import Columns
from trainer.durable import atomic_file, atomic_write

SUFFIX = ".tsv"
IDENTITY = "identity.json"


class TableFile:
    """A table whose rows come in parts; each that is written stays, and the next run skips it.

    `columns` say where each field stands, by name or number, as in the table that it extends. What
    it is made of, `identity`, must be the same when it is resumed.
    """

    def __init__(self, path: Path, columns: Columns, identity: Mapping[str, Any]) -> None:
        """Raise DataError where the file is there, or was begun of something else."""
        self.path, self._columns = path, columns
        self._parts = path.with_name(f".{path.name}.part")
        if path.suffix != SUFFIX:
            raise DataError(f"--out {path}: must end in {SUFFIX}: it is a table with tabs")
        if path.exists():
            raise DataError(f"--out {path}: is there already; delete it, or name another")
        text = json.dumps(identity, indent=2, sort_keys=True)
        told = self._parts / IDENTITY
        if not told.exists():  # a table was finished, and its parts were not all removed
            shutil.rmtree(self._parts, ignore_errors=True)
        elif told.read_text(encoding="utf-8") != text:
            raise DataError(
                f"--out {path}: was begun of other examples or settings; repeat the command with "
                f"those, or delete {self._parts}"
            )
        try:
            self._parts.mkdir(parents=True, exist_ok=True)
            atomic_write(told, text)
        except OSError as error:
            raise DataError(f"--out {path}: cannot be written: {error.strerror}") from None

    def has(self, part: int) -> bool:
        """Whether a part is written."""
        return self._name(part).exists()

    def write(self, part: int, rows: Iterable[Mapping[str, str]]) -> None:
        """Write a part: rows of values by field."""
        atomic_write(self._name(part), "".join(f"{self._line(row)}\n" for row in rows))

    def finish(self, parts: int) -> int:
        """Join the parts, with a header where columns have names; the number of their rows."""
        header = "" if self._numbered else "\t".join(map(str, self._columns.values())) + "\n"
        rows = 0
        with atomic_file(self.path) as file:
            file.write(header.encode())
            for part in range(parts):  # one at a time, as the table may not fit into memory
                content = self._name(part).read_bytes()
                file.write(content)
                rows += content.count(b"\n")
        os.replace(self._parts / IDENTITY, self.path.with_name(f"{self.path.name}.json"))
        shutil.rmtree(self._parts)
        return rows

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
