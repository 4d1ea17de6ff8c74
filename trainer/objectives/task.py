"""What every task on labelled examples is: a term with its examples, its head and its metrics.

A task is a module of `trainer.tasks`, or of a user. A job that names its files in ``data.train``
encodes them once, by `TaskConfig.encode`, and trains the heads of those learners whose objective
has the task.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from data_pipeline import EncodedExample, TextEncoder
from data_pipeline.task_files.tables import Columns
from model import Ability
from trainer.objectives.term import TermConfig
from trainer.scoring.metric import Metric


@dataclass(frozen=True)
class TaskFile:
    """A file of examples: where it is, and which column holds each field."""

    path: Path
    columns: Mapping[str, str]

    def columns_of(self, *fields: str) -> Columns:
        """The columns of these fields of a table: as named in ``data.columns``, or as the field."""
        named = {name: self.columns.get(name, name) for name in fields}
        return {name: int(one) if one.isdecimal() else one for name, one in named.items()}


@dataclass
class TaskConfig(TermConfig):
    """The YAML section of a task.

    name: that of the task, which its head and its target share. fields: the columns that a table of
    its examples has; none where it reads files of another form.
    """

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]] = ()
    source: ClassVar[None] = None
    needs: ClassVar[tuple[Ability, ...]] = (Ability.TASK_HEAD,)
    reads_all_positions: ClassVar[bool] = True

    @property
    def head(self) -> str:
        return self.name

    def with_labels_of(self, file: TaskFile) -> TaskConfig:
        """The section with what its training file says of it, such as its labels."""
        return self

    @abstractmethod
    def encode(self, file: TaskFile, encoder: TextEncoder) -> Iterator[EncodedExample]:
        """The examples of a file, in order; DataError, naming file and line, for a bad one."""

    @abstractmethod
    def own_metrics(self) -> tuple[Metric[Any], ...]:
        """What its head is scored by, the primary metric first."""
