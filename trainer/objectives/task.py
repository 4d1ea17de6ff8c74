"""The base of every task on labelled examples: a term with its examples, head and metrics.

A task is a module in `trainer.tasks` or in a user's plugin. A job that names the task's files in
``data.train`` encodes them once, by `TaskConfig.encode`. It trains the task's head in every learner
whose objective contains the task.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from configs.kinds import require_returned
from configs.rules import PROBABILITY, Range
from configs.section import Refusal
from data_pipeline import (
    MASKED,
    NO_LABEL,
    TASK_NAME,
    DataError,
    EncodedExample,
    ExampleSplit,
    TextEncoder,
    View,
)
from data_pipeline.examples.storing import read_references
from data_pipeline.hashing import HeldOutDraw, scalar_key
from data_pipeline.task_files.contents import UTF_8, Dropped
from data_pipeline.task_files.tables import Columns, Row, read_table
from model import (
    HEAD_NAMES,
    Ability,
    Capture,
    HeadModuleConfig,
    ModelConfig,
    TaskHeadConfig,
    may_name_a_head,
    with_task_head,
)
from trainer.batches import MicroBatch
from trainer.objectives.term import ExampleLosses, LossInputs, Term, TermConfig
from trainer.scoring.metric import Metric


@dataclass
class HeadTermConfig(TermConfig):
    """The YAML section of a term about a head that a task beside it has.

    With several tasks it stands for a term for each, which is called ``SECTION_TASK``.
    """

    needs: ClassVar[tuple[Ability, ...]] = (Ability.TASK_HEAD,)

    tasks: Annotated[list[str], "The tasks whose heads learn; empty: each of the job's tasks."] = (
        field(default_factory=list, kw_only=True)
    )

    def beside(self, name: str, tasks: Collection[str]) -> Mapping[str, TermConfig]:
        chosen = self.tasks or [*tasks]
        if len(tasks) < 2 and len(chosen) < 2:
            return {name: dataclasses.replace(self, tasks=chosen)}
        return {f"{name}_{task}": dataclasses.replace(self, tasks=[task]) for task in chosen}

    def conflicts_with_task(self, task: TaskConfig) -> Iterator[Refusal]:
        """The keys that mean nothing for the head's task, each with the reason."""
        yield from ()

    def unequippable(self, model: ModelConfig) -> Iterator[str]:
        yield from super().unequippable(model)
        if self.head == MASKED:
            yield "is about the head of a task, and a translation has none; remove it"

    @property
    def head(self) -> str:
        """The name of the one head; empty where there is no task."""
        return next(iter(self.tasks), "")


class HeadTerm(Term):
    """A term that reads the outputs of one task head."""

    def __init__(self, config: TermConfig) -> None:
        super().__init__(config)
        assert config.head is not None
        self.head = config.head

    def concerns(self, targets: Collection[str]) -> bool:
        return self.head in targets

    def student_capture(self, step: int) -> Capture:
        return Capture(heads=(self.head,))


Record = TypeVar("Record")
MAX_DIGITS = 18  # of a column's number
LABEL = "label"  # the field that is predicted
STATISTICS = ("means", "deviations")  # keys that the training examples fill in


@dataclass(frozen=True)
class TaskFile:
    """A file of examples, the column that holds each field, and the task's other files by name.

    Only the first `most` records are read; None: all.
    """

    path: Path
    columns: Mapping[str, str]
    others: Mapping[str, Path] = field(default_factory=dict)
    most: int | None = None
    encoding: str = UTF_8

    def first(self, records: Iterator[Record]) -> Iterator[Record]:
        """The records that are read."""
        return islice(records, self.most)

    def columns_of(self, *fields: str) -> Columns:
        """The column of each of these fields: from ``data.columns``, else the field's own name."""
        named = {name: self.columns.get(name, name) for name in fields}
        return {
            name: int(column) if _is_number(column) else column for name, column in named.items()
        }

    def column_number(self, name: str) -> int | None:
        """The number of a field's column, from 1, in a file without a header; None if not set.

        Raises DataError where ``data.columns`` gives something other than a number.
        """
        named = self.columns.get(name)
        if named is not None and not (_is_number(named) and int(named)):
            raise DataError(f"data.columns.{name}: must be a column's number from 1, not {named}")
        return None if named is None else int(named)


def _is_number(column: str) -> bool:
    """Whether a column is named by its number; Python reads no number of 4301 digits."""
    return column.isdecimal() and len(column) < MAX_DIGITS


@dataclass(frozen=True)
class Part:
    """The examples of a file that are trained on, or the examples that are scored (`is_held_out`).

    fraction: the fraction of a file's units that is held out; None: the file is one part.
    """

    is_held_out: bool
    fraction: float | None = None

    def has(self, unit: int) -> bool:
        """Whether the unit with this number, from 0, is in it.

        One unit of each stretch is held out, drawn at random, since labels may come in turn.
        """
        if self.fraction is None:
            return True
        size = 1 / Fraction(self.fraction).limit_denominator(10**6)  # 0.1 is meant to be 1 in 10
        stretch = unit // size
        first, following = ceil(stretch * size), ceil((stretch + 1) * size)
        place = scalar_key(HeldOutDraw.EXAMPLE, stretch) % (following - first)
        return (unit == first + place) == self.is_held_out


@dataclass
class TaskConfig(TermConfig):
    """The YAML section of a task.

    name: the name of this kind of task, and of its head unless `head_name` gives another; the names
    of its targets and scores begin with that of its head. fields: the columns of a table of its
    examples, of which the predicted one is called ``label`` unless the task overrides `texts`;
    empty if it reads files of another format. needs_validation: whether it needs a
    validation file, because a part of the training file cannot stand in for one. reads: the other
    files that it needs, and may_read those that it can do without, by name. can_read_some: whether
    the first examples of a file can be read without the others. not_encoded: the keys that have
    no effect on how examples are encoded. joins: whether it can be one of several tasks. views: the
    forms besides the default in which an example can be read, and the fields in each; unaligned:
    those of them whose labels are not the default's.
    """

    layers: Annotated[
        list[int],
        Range(-4097, 4096),
        "The layers whose hidden states, concatenated, the head reads: 1 is the first, -1 the "
        "last. Empty: the last.",
    ] = field(default_factory=list)
    head_name: Annotated[
        str | None,
        TASK_NAME,
        "The name of its head, with which the names of its scores begin; null: the name of "
        "this section.",
    ] = None

    dropout: Annotated[
        float | None,
        PROBABILITY,
        "Dropout probability of the input of the head's last layer; null: the learner's dropout.",
    ] = None

    module: Annotated[
        HeadModuleConfig | None,
        "The module of the head, such as {kind: attention_pooling}, which reads the states "
        "of all tokens; null: the head that `transformers` has for the architecture.",
    ] = None

    name: ClassVar[str]
    fields: ClassVar[tuple[str, ...]] = ()
    views: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    unaligned: ClassVar[frozenset[str]] = frozenset()
    needs_validation: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ()
    may_read: ClassVar[tuple[str, ...]] = ()
    can_read_some: ClassVar[bool] = True
    not_encoded: ClassVar[tuple[str, ...]] = (
        "weight",
        "metrics",
        "layers",
        "dropout",
        "module",
        "activation",
        "class_weights",
        *STATISTICS,
    )
    joins: ClassVar[bool] = True
    any_tokenizer: ClassVar[bool] = False
    needs: ClassVar[tuple[Ability, ...]] = (Ability.TASK_HEAD,)

    @property
    def predicts_a_number(self) -> bool:
        """Whether the task's `choices` are single numbers, in place of logits."""
        return False

    def conflicts(self) -> Iterator[Refusal]:
        # Its weight may be 0: the head then learns from soft labels alone.
        if self.head_name and not self.joins:
            yield "head_name", f"a head of {self.name} has that name; remove it"
        if self.head_name and not may_name_a_head(self.head_name):
            yield "head_name", HEAD_NAMES

    @property
    def head(self) -> str:
        return self.head_name or self.name

    def unequippable(self, model: ModelConfig) -> Iterator[str]:
        yield from super().unequippable(model)
        if why := model.lacks_states(self.layers):
            yield f"layers: {why}"

    @property
    def teacher_head(self) -> TaskHeadConfig | None:
        """The head of a frozen teacher that has none for the task; None: it must have learnt it."""
        return None

    def with_head(self, model: ModelConfig, head: TaskHeadConfig) -> ModelConfig:
        """The model with the task's head, which reads the task's `layers`."""
        if self.module is not None:  # it reads every token
            head = dataclasses.replace(head, module=self.module, pooling="", transform="")
        head = dataclasses.replace(head, layers=self.layers, dropout=self.dropout)
        return with_task_head(model, self.head, head)

    def has_head(self, model: ModelConfig) -> bool:
        """Whether a model has the head of the task."""
        return self.head in model.task_heads

    def files_of(self, path: Path) -> list[Path]:
        """The files that hold the examples at `path`. Raises DataError."""
        return [path]

    def references(self, file: TaskFile, part: Part) -> Any:
        """The values, besides the targets, with which its metrics compare predictions, as JSON."""
        return None

    def scored_on(self, folder: Path) -> TaskConfig:
        """The section with the folder of the encoded examples that its metrics score."""
        return self

    def with_labels_of(self, file: TaskFile) -> TaskConfig:
        """The section completed from its training file, for instance with its labels."""
        return self

    def trained_on(self, examples: ExampleSplit) -> TaskConfig:
        """The section completed from the encoded examples that it is trained on."""
        return self

    @property
    def placed_fields(self) -> tuple[str, ...]:
        """The fields whose columns the job can name in ``data.columns``."""
        return (*self.fields, *self.numeric_fields)

    @property
    def numeric_fields(self) -> tuple[str, ...]:
        """The fields of a table that hold numbers which its head reads beside the texts."""
        return ()

    @property
    def skips_malformed(self) -> bool:
        """Whether rows of a wrong number of columns are left out."""
        return False

    @property
    def lists(self) -> tuple[str, ...]:
        """The fields that hold lists."""
        return ()

    @property
    def texts(self) -> tuple[str, ...]:
        """The fields that hold what a learner reads: all but ``label``, which is predicted."""
        return tuple(name for name in self.fields if name != LABEL)

    def texts_of(self, view: str) -> tuple[str, ...]:
        """The fields that a learner of this view reads."""
        return self.views.get(view, self.texts)

    def view(self, name: str, seed: int) -> View:
        """One of its `views`; random choices in it depend on the `seed`."""
        return View([tuple(self.texts.index(text) for text in self.texts_of(name))])

    def aligns(self, view: str, other: str) -> bool:
        """Whether learners of these views have the same labels, in the same order."""
        return view == other or self.unaligned.isdisjoint((view, other))

    def unreadable(self, view: str, model: ModelConfig) -> str | None:
        """Why the model cannot read examples in this form, if it cannot."""
        return None

    def rows(self, file: TaskFile, *fields: str, dropped: Dropped) -> Iterator[Row]:
        """The rows of a table with these fields; `dropped` counts the blank and malformed ones.

        Raises DataError as `read_table`.
        """
        rows = read_table(
            str(file.path),
            file.columns_of(*fields),
            on_malformed=dropped.malformed if self.skips_malformed else None,
            lists=self.lists,
            encoding=file.encoding,
            numbers=self.numeric_fields,
        )
        return dropped.present(rows)

    @abstractmethod
    def encode(self, file: TaskFile, encoder: TextEncoder) -> Iterator[EncodedExample]:
        """The examples of a file, in order. Raises DataError, naming the line, for a bad one."""

    def encode_part(
        self, file: TaskFile, encoder: TextEncoder, part: Part
    ) -> Iterator[EncodedExample]:
        """The examples of a part of a file, in order.

        A task overrides this if its examples are scored in another form than in training.
        """
        name, examples = f"{type(self).__name__}.encode", self.encode(file, encoder)
        require_returned(examples, Iterable, name)  # type: ignore[type-abstract]
        for number, example in enumerate(examples):
            require_returned(example, EncodedExample, f"{name}: each example")
            if part.has(self.unit_of(number, example)):
                yield example

    def unit_of(self, number: int, example: EncodedExample) -> int:
        """The unit with which an example, the file's `number`-th from 0, is held out."""
        return number

    @abstractmethod
    def choices(self, logits: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """The head's `logits` as N choices between K classes, [N, K], and their weights, [N].

        [N, 1] are numbers, for regression. The weight of a choice without a label is 0.
        """

    @abstractmethod
    def own_metrics(self) -> tuple[Metric[Any], ...]:
        """The metrics of its head, the primary one first."""

    def metrics_in(self, view: str) -> tuple[Metric[Any], ...]:
        """The metrics of a learner of this view."""
        return self.own_metrics()


@dataclass
class ScoredByReferences(TaskConfig):
    """A task whose metrics need `references`, which are stored with its encoded examples."""

    # Not in the `repr`, by which a learner knows comparable losses: a run may move.
    examples: Annotated[
        str, "The folder of the encoded examples that are scored; filled in by the job."
    ] = field(default="", repr=False)

    not_encoded: ClassVar[tuple[str, ...]] = (*TaskConfig.not_encoded, "examples")

    def scored_on(self, folder: Path) -> TaskConfig:
        return dataclasses.replace(self, examples=str(folder))

    def stored_references(self) -> Any:
        """The `references` of the examples that are scored. Raises DataError."""
        return read_references(Path(self.examples))


class TaskTerm(HeadTerm):
    """The loss of a task's head over the labels of its target, which has the head's name."""

    def __init__(self, config: TermConfig) -> None:
        super().__init__(config)
        self.denominator = self.head


class WholeBatchTerm(TaskTerm):
    """A task's loss in which each example's loss depends on the whole global batch.

    It reads the outputs of the task's head and, where it has a `source`, those of the source's head
    for the task; nothing else of the models.
    """

    @abstractmethod
    def over_batch(
        self, outputs: Sequence[Tensor], batches: Sequence[MicroBatch], theirs: Sequence[Tensor]
    ) -> list[ExampleLosses]:
        """The losses of each micro-batch of this rank, by the head's outputs, detached. Collective.

        `theirs` are the outputs of the source, for each micro-batch; none without a source. The
        gradients are those of the sum over all examples of all ranks, in the outputs' shape.
        """

    def forward(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        outputs = inputs.features.heads[self.head]
        example_losses = inputs.whole_batch.get(self)
        if example_losses is None:  # this rank has one micro-batch
            theirs = [] if self.source is None else [*self.outputs(inputs).heads[self.head]]
            (example_losses,) = self.over_batch([outputs.detach()], [inputs.batch], theirs)
        through = (outputs.float() * example_losses.gradients).sum()
        # The value of the losses, the gradient of what goes through.
        total = example_losses.losses.sum() + (through - through.detach())
        return total, (inputs.batch.row_labels(self.denominator) != NO_LABEL).sum()


def against_all(
    rows: Tensor, others: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each of this rank's `rows`, by the `others` of all ranks. Collective.

    rows: [r, ...]; others: [r, ...], of this rank; loss: of (rows, the others of all ranks), [r].
    Returns the losses, and the gradients of their sum over all ranks at `rows` and `others`.
    """
    everyone = over_ranks(others)
    with torch.enable_grad(), torch.autocast(rows.device.type, enabled=False):
        leaves = rows.clone().requires_grad_(), everyone.requires_grad_()
        losses = loss(*leaves)
        of_rows, of_others = torch.autograd.grad(losses.sum(), leaves)
    dist.all_reduce(of_others)  # the rows of every rank are compared with them
    first = dist.get_rank() * len(others)
    return losses.detach(), of_rows, of_others[first : first + len(others)]


def over_ranks(rows: Tensor) -> Tensor:
    """The rows of all ranks, [ranks * rows, ...], in their order; all have equally many."""
    rows = rows.contiguous()
    gathered = rows.new_empty((dist.get_world_size() * len(rows), *rows.shape[1:]))
    dist.all_gather_into_tensor(gathered, rows)
    return gathered
