"""The batch that the pipeline hands to the trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from data_pipeline.masking.masker import NO_LABEL

# The names of the targets of a text corpus. A task with data of its own may add others.
MASKED, PAIRS = "masked", "pairs"
DEFAULT_VIEW = "default"


def shared_view(first: str, second: str) -> str:
    """The name of the view whose positions are the aligned spans of two tokenizers' views."""
    return " and ".join(sorted((first, second)))


def filled(
    rows: Sequence[NDArray[Any] | Sequence[int]], fill: int = 0, least: int = 1
) -> NDArray[np.int64]:
    """Rows of several lengths as one array, of at least this width."""
    array = np.full((len(rows), max([least, *map(len, rows)])), fill, np.int64)
    for values, row in zip(rows, array, strict=True):
        row[: len(values)] = values
    return array


@dataclass(frozen=True)
class Target:
    """The labels of R examples; -100 where there is none, or NaN where labels are real numbers.

    Token labels are [R, M]; `positions` [R, M] holds their columns, 0 in unused slots. Labels of
    whole examples are [R], or [R, M] where an example has several, and `positions` is None.
    """

    labels: NDArray[np.int64] | NDArray[np.float32]
    positions: NDArray[np.int64] | None = None

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[NDArray[np.integer], NDArray[np.int64]]]) -> Target:
        """The target made of each row's token labels and their columns."""
        labels = filled([row_labels for row_labels, _ in rows], NO_LABEL)
        return cls(labels, filled([columns for _, columns in rows]))

    @property
    def is_labelled(self) -> NDArray[np.bool_]:
        """True where there is a label."""
        if self.labels.dtype.kind == "f":
            return ~np.isnan(self.labels)
        return self.labels != NO_LABEL

    def in_columns(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """Token labels in their columns of sequences of this shape; others as they are."""
        if self.positions is None:
            return self.labels
        none = np.nan if self.labels.dtype.kind == "f" else NO_LABEL
        dense = np.full((shape[0], math.prod(shape[1:])), none, self.labels.dtype)
        row, slot = np.nonzero(self.is_labelled)
        dense[row, self.positions[row, slot]] = self.labels[row, slot]
        return dense.reshape(shape)

    def trimmed(self, length: int, longest: int) -> Target:
        """The target where sequences of `length` are cut to `longest`, which holds all tokens."""
        if self.positions is None:
            return self
        sequence, column = np.divmod(self.positions, length)
        return Target(self.labels, sequence * longest + column)

    def without(self, rows: NDArray[np.bool_]) -> Target:
        """The target without the labels of these rows [R]."""
        chosen = rows if self.labels.ndim == 1 else rows[:, None]
        none = np.nan if self.labels.dtype.kind == "f" else NO_LABEL
        labels = np.where(chosen, np.array(none, self.labels.dtype), self.labels)
        return Target(labels, self.positions)


@dataclass(frozen=True)
class StoredLogits:
    """A teacher's k largest logits in each of M slots for masked positions; 0 in unused slots."""

    values: NDArray[np.float32]  # [R, M, k]
    ids: NDArray[np.int64] | None  # [R, M, k] their tokens; None: of the whole vocabulary, in order


@dataclass(frozen=True)
class Runs:
    """The tokens of S aligned spans in one view, and of N masked ones that are one token each."""

    first: NDArray[np.int64]  # [R, S] the column of each span's first token
    sizes: NDArray[np.int64]  # [R, S] tokens of each; 0: no span
    slots: NDArray[np.int64]  # [R, N] their places among the M of the view's target `MASKED`

    def trimmed(self, longest: int) -> Runs:
        """The first spans of each row, which are all that there are."""
        return Runs(self.first[:, :longest], self.sizes[:, :longest], self.slots)


@dataclass(frozen=True)
class Batch:
    """R examples with their targets by name: sequences of length L, or C such sequences each.

    A batch of text has the target `MASKED`, with M slots for masked positions in each sequence. If
    its sequences are pairs, it also has the target `PAIRS`, with one label for each sequence.

    views: the same examples in other forms, by name, such as [X; Y] beside X. Rows are in the same
    order in every view, and so are labels, unless a view masks some of the tokens alone; positions
    are specific to a view. Where an example is several sequences (the choices of a question),
    [R, L] is [R, C, L], and columns count through C * L.

    stored: what was stored of teachers' predictions, by the teacher's name.

    document_ids: where a row holds several documents, which attend to themselves only, the number
    of each position's document in its row, from 1; 0 at padding.

    numbers: what a head reads beside the text, as in the table, [R, K]; None: nothing.

    runs: where positions are the aligned spans of two views (`shared_view`), by the view.

    is_causal: each position predicts the next token, and attends to none behind itself.

    is_trimmed: L is the length of the batch's longest sequence, and says nothing of other batches.
    """

    input_ids: NDArray[np.int64]  # [R, L]
    segment_ids: NDArray[np.int64]  # [R, L] 0 or 1
    attention_mask: NDArray[np.int64]  # [R, L] 1 where there is a token, 0 at padding
    targets: Mapping[str, Target]
    sample_ids: NDArray[np.int64]  # [R] unique within an epoch
    epochs: NDArray[np.int64]  # [R]
    to_mask: NDArray[np.int64] | None = None  # [R] positions still to be chosen; None: masked
    readable: NDArray[np.bool_] | None = None  # [R] False for unreadable sequences; None: all True
    views: Mapping[str, Batch] = field(default_factory=dict)
    is_trimmed: bool = False
    stored: Mapping[str, StoredLogits] = field(default_factory=dict)
    numbers: NDArray[np.float64] | None = None
    document_ids: NDArray[np.int64] | None = None  # [R, L]
    runs: Mapping[str, Runs] = field(default_factory=dict)
    is_causal: bool = False

    @property
    def documents(self) -> NDArray[np.int64]:
        """The number of each position's document, 0 at padding: `document_ids`, or 1 of each row's.

        [R, L], or [R, C, L] where an example is several sequences.
        """
        return self.attention_mask if self.document_ids is None else self.document_ids

    def rows(self, first: int, last: int) -> Batch:
        """The rows from `first` up to `last`, as views."""
        return self.take(slice(first, last))

    def take(self, rows: slice | NDArray[np.int64]) -> Batch:
        """The rows that an index selects: views for a slice, copies for an array."""
        return _taken(self, rows)

    def without_labels(self, rows: NDArray[np.bool_]) -> Batch:
        """The batch without the labels of these rows [R], in every view."""
        return replace(
            self,
            targets={name: target.without(rows) for name, target in self.targets.items()},
            views={name: view.without_labels(rows) for name, view in self.views.items()},
        )

    def trimmed(self) -> Batch:
        """Without the columns that are padding in all rows, if it `is_trimmed`; so its views."""
        if not (self.is_trimmed or self.views):
            return self
        views = {name: view.trimmed() for name, view in self.views.items()}
        longest = int(self.attention_mask.sum(axis=-1).max(initial=1))
        if not self.is_trimmed or longest == self.input_ids.shape[-1]:
            return replace(self, views=views) if views else self
        names = ("input_ids", "segment_ids", "attention_mask", "document_ids")
        held = {name: getattr(self, name) for name in names}
        cut = {name: ids[..., :longest] for name, ids in held.items() if ids is not None}
        runs = {name: run.trimmed(longest) for name, run in self.runs.items()}
        length = self.input_ids.shape[-1]
        targets = {name: target.trimmed(length, longest) for name, target in self.targets.items()}
        return replace(self, **cut, targets=targets, views=views, runs=runs)

    def view(self, name: str) -> Batch:
        """The examples in the form that learners of this view read."""
        return self if name == DEFAULT_VIEW else self.views[name]

    def labels(self) -> NDArray[np.int64]:
        """Dense labels [R, L]: the id to predict at masked positions, -100 elsewhere."""
        return self.targets[MASKED].in_columns(self.input_ids.shape)


Part = TypeVar("Part")


def _taken(part: Part, rows: slice | NDArray[np.int64]) -> Part:
    """These rows of all arrays of a batch, or of a part of it."""
    taken: Any = part
    if isinstance(part, np.ndarray):
        taken = part[rows]
    elif isinstance(part, Mapping):
        taken = {name: _taken(value, rows) for name, value in part.items()}
    elif isinstance(part, Batch | Target | StoredLogits | Runs):
        taken = replace(part, **_taken(vars(part), rows))
    return taken
