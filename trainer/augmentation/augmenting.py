"""More examples of a task in a table: those that there are, each followed by its copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from configs.progress import tracked
from data_pipeline import DataError
from data_pipeline.task_files.dropped import Dropped
from trainer.augmentation.table_file import TableFile
from trainer.config import JobConfig
from trainer.job_data.digests import digest_of, watch
from trainer.job_data.examples import tasks_of
from trainer.objectives.task import LABEL

PART = 64  # examples that are written at a time
PARTS = f"parts of {PART:,} examples"
Row = Mapping[str, str]


class Copies(Protocol):
    """Makes the copies of examples."""

    def of_examples(self, rows: Sequence[Row], first: int) -> Iterator[Row]:
        """Yield each row, then its copies; `first` is the number of the first row."""


class Method(Protocol):
    """A way to make copies, with its settings."""

    @property
    def files(self) -> Sequence[Path]:
        """The files and folders that `over` reads."""

    def identity(self) -> dict[str, Any]:
        """Plain values that are equal for equal results; DataError for a file that is not there."""

    def over(self, rows: Sequence[Row], texts: Sequence[str], device: torch.device) -> Copies:
        """The maker of the copies of these examples, whose `texts` are these fields."""


def augment(
    job: JobConfig,
    method: Method,
    out: Path,
    device: torch.device,
) -> tuple[int, int]:
    """Write the training examples of a task with their copies to `out`; how many, and of how many.

    `job` is about one task. An interrupted call is resumed by the same call. Raises DataError or
    ModelError, one line, for a task that is not about texts in tables, or has no validation file,
    and for bad inputs.
    """
    (job_task,) = tasks_of(job)
    name, task = job_task.name, job_task.task
    if LABEL not in task.fields:
        raise DataError(f"{name} does not read texts from tables, so has no copies")
    if not job.data.validation:
        raise DataError(
            "data.validation: must be set: of augmented examples no part can be held out, as "
            "copies of it stay in the others"
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
                table.write(part, copies.of_examples(some, first))
        return table.finish(len(parts)), len(rows)
