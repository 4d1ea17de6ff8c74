"""What every task on labelled examples is: a term with its examples, its head and its metrics.

A task is a module of `trainer.tasks`, or of a user. A job that names its files in ``data.train``
encodes them once, by `TaskConfig.encode`, and trains the heads of those learners whose objective
has the task.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from torch import Tensor

from configs.rules import Doc, Range
from configs.section import Refusal
from data_pipeline import DataError, EncodedExample, TextEncoder
from data_pipeline.task_files.tables import Columns
from model import Ability, ModelConfig, TaskHeadConfig, with_task_head
from trainer.batches import MicroBatch
from trainer.objectives.term import TermConfig
from trainer.scoring.metric import Metric

UNKNOWN_LABELS = ["0", "1"]  # of a head, until the training file is read


@dataclass(frozen=True)
class TaskFile:
    """A file of examples: where it is, and which column holds each field."""

    path: Path
    columns: Mapping[str, str]

    def columns_of(self, *fields: str) -> Columns:
        """The columns of these fields of a table: as named in ``data.columns``, or as the field."""
        named = {name: self.columns.get(name, name) for name in fields}
        return {name: int(one) if one.isdecimal() else one for name, one in named.items()}

    def column_number(self, name: str) -> int | None:
        """The number of a field's column in a file whose columns have no names; None: not named.

        Raises DataError where it is no number.
        """
        named = self.columns.get(name)
        if named is not None and not named.isdecimal():
            raise DataError(f"data.columns.{name}: must be a column's number from 1, not {named}")
        return None if named is None else int(named)


@dataclass
class TaskConfig(TermConfig):
    """The YAML section of a task.

    name: that of the task, which its head and its target share. fields: the columns that a table of
    its examples has; none where it reads files of another form. needs_validation: whether a part of
    the training file cannot stand in for a validation file. not_encoded: the keys that have no
    effect on how examples are encoded.
    """

    layers: Annotated[
        list[int],
        Range(-4097, 4096),
        Doc(
            "The hidden states that the head reads, side by side: 1 is the first layer's, -1 the "
            "last; none: the last."
        ),
    ] = field(default_factory=list)

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]] = ()
    needs_validation: ClassVar[bool] = False
    not_encoded: ClassVar[tuple[str, ...]] = ("weight", "metrics", "layers")
    source: ClassVar[None] = None
    needs: ClassVar[tuple[Ability, ...]] = (Ability.TASK_HEAD,)

    def conflicts(self) -> Iterator[Refusal]:
        yield from ()  # its weight may be 0: its head then learns from soft labels alone

    @property
    def head(self) -> str:
        return self.name

    def with_head(self, model: ModelConfig, head: TaskHeadConfig) -> ModelConfig:
        """The model with the task's head, which reads the task's `layers`."""
        return with_task_head(model, self.name, dataclasses.replace(head, layers=self.layers))

    def scored_on(self, file: TaskFile) -> TaskConfig:
        """The section, for scores on the examples of `file`."""
        return self

    def with_labels_of(self, file: TaskFile) -> TaskConfig:
        """The section with what its training file says of it, such as its labels."""
        return self

    @abstractmethod
    def encode(self, file: TaskFile, encoder: TextEncoder) -> Iterator[EncodedExample]:
        """The examples of a file, in order; DataError, naming file and line, for a bad one."""

    @classmethod
    @abstractmethod
    def choices(cls, logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """What the head's `logits` choose between, [N, K] ([N, 1]: a number), and weights [N].

        A weight is 0 where a batch has no label.
        """

    @abstractmethod
    def own_metrics(self) -> tuple[Metric[Any], ...]:
        """What its head is scored by, the primary metric first."""
