"""An encoded example, the form that all examples of a task share, and its views.

Views are the forms in which learners read an example beside its full one. A view is made of an
example's segments. A view of pairs may mask tokens of the second text, which a model that reads
both then predicts (C-MLM, Chen et al., arXiv 1911.03829).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from data_pipeline.hashing import MaskChoice, random_uint32, scalar_key
from data_pipeline.reading.batches import MASKED, Batch, Target
from data_pipeline.reading.corpus import Corpus

# What a target has a value for: the example, or each token; or as many values as there are.
WHOLE, TOKENS, SEVERAL = "whole", "tokens", "several"

Segment = NDArray[np.integer]  # token ids, without special tokens


@dataclass(frozen=True)
class EncodedExample:
    """One example: its sequences, each of one or two segments, and its targets by name.

    A target of the example is a number, or a tuple of whole numbers; a target of its tokens has one
    for each token of the segments, in order, -100 where there is none. predicted: the number of the
    sequence whose tokens, but the first, are to be predicted: batches have them as `MASKED`.
    columns: numbers that a model reads beside the text, by name.
    """

    sequences: Sequence[Sequence[Segment]]
    targets: Mapping[str, float | tuple[int, ...] | NDArray[np.int64]]
    predicted: int | None = None
    columns: Mapping[str, float] = field(default_factory=dict)

    @property
    def segments(self) -> list[Segment]:
        """The segments of all sequences, in order."""
        return [segment for sequence in self.sequences for segment in sequence]

    @classmethod
    def joined(cls, forms: Sequence[EncodedExample]) -> EncodedExample:
        """One example as several tokenizers read it, which has labels of the whole alone."""
        return replace(forms[0], sequences=[part for form in forms for part in form.sequences])


_KINDS: Mapping[type, str] = {np.ndarray: TOKENS, tuple: SEVERAL}


@dataclass(frozen=True)
class Layout:
    """The form that all examples of a task share.

    segments: how many each of an example's sequences has. targets: each target's name, with what
    it has a value for (`WHOLE`, `TOKENS` or `SEVERAL`). numbers: the targets that are real numbers;
    the others are classes or positions. predicted: as in `EncodedExample`. columns: the names of
    its `columns`, in order. tokenizers: by how many they are read; the sequences of each follow
    those of the one before.
    """

    segments: tuple[int, ...]
    targets: Mapping[str, str]
    numbers: tuple[str, ...] = ()
    predicted: int | None = None
    columns: tuple[str, ...] = ()
    tokenizers: int = 1

    @property
    def first(self) -> Layout:
        """The form of the examples as the first of their tokenizers reads them."""
        sequences = len(self.segments) // self.tokenizers
        return replace(self, segments=self.segments[:sequences], tokenizers=1)

    @property
    def sequences(self) -> list[list[int]]:
        """The numbers of the segments that each sequence has."""
        ends = itertools.accumulate(self.segments, initial=0)
        return [[*range(*bounds)] for bounds in itertools.pairwise(ends)]

    @classmethod
    def of(cls, example: EncodedExample, tokenizers: int = 1) -> Layout:
        """The layout of one example, which the others must share."""
        targets = {name: _KINDS.get(type(value), WHOLE) for name, value in example.targets.items()}
        numbers = tuple(name for name, value in example.targets.items() if isinstance(value, float))
        segments = tuple(len(sequence) for sequence in example.sequences)
        columns = tuple(example.columns)
        return cls(segments, targets, numbers, example.predicted, columns, tokenizers)

    def dtype(self, target: str) -> np.dtype:
        """How a target is stored."""
        return np.dtype("<f4") if target in self.numbers else np.dtype("<i4")

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the manifest."""
        lists = {name: [*getattr(self, name)] for name in ("segments", "numbers", "columns")}
        return {**asdict(self), **lists}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Layout:
        """The reverse of `to_json`."""
        segments, numbers = tuple(tree["segments"]), tuple(tree["numbers"])
        columns = tuple(tree.get("columns", ()))
        several = tree.get("tokenizers", 1)
        return cls(segments, tree["targets"], numbers, tree.get("predicted"), columns, several)


class Masks(Protocol):
    """Which tokens of a text are masked, and in which of an example's sequences."""

    is_redrawn: ClassVar[bool]  # whether an example has other masks in another epoch

    def __call__(self, tokens: int, epoch: int, number: int) -> NDArray[np.int64]:
        """The sequence in which each of an example's `tokens` is masked, from 0; -1: in none.

        `number` is that of the example.
        """


@dataclass(frozen=True)
class SomeTokens:
    """Masks each token with the probability `fraction`, anew in every epoch; at least one."""

    fraction: float
    seed: int

    is_redrawn: ClassVar[bool] = True

    def __call__(self, tokens: int, epoch: int, number: int) -> NDArray[np.int64]:
        key = np.array([scalar_key(self.seed, MaskChoice.VIEW, epoch, number)], np.uint64)
        draws = random_uint32(key, np.arange(tokens))[0]
        least = max(round(self.fraction * 2**32), int(draws.min()) + 1)
        return np.where(draws < least, 0, -1)


@dataclass(frozen=True)
class EveryToken:
    """Masks each token once: token j in sequence j mod C, of C `sequences`."""

    sequences: int

    is_redrawn: ClassVar[bool] = False

    def __call__(self, tokens: int, epoch: int, number: int) -> NDArray[np.int64]:
        return np.arange(tokens) % self.sequences


@dataclass(frozen=True)
class View:
    """One form of an example.

    sequences: the numbers of the segments that each of its sequences has. masks: what is masked of
    their second segments, which are then all the same; None: nothing. corpus: the examples as the
    view's tokenizer reads them; None: by the first.
    """

    sequences: Sequence[Sequence[int]]
    masks: Masks | None = None
    corpus: Corpus | None = None


def with_masks(batch: Batch, masks: Masks, mask: int) -> Batch:
    """The batch with the token `mask` in place of those that `masks` chooses, and their labels.

    It chooses among the tokens of the second segment and the [SEP] behind them. All sequences of an
    example are the same. `MASKED` has the labels in the order of the text, whichever sequence they
    are in.
    """
    rows, length = len(batch.input_ids), batch.input_ids.shape[-1]
    ids = batch.input_ids.reshape(rows, -1, length).copy()
    second = batch.segment_ids.reshape(ids.shape)[:, 0] == 1  # [R, L]
    masked = []
    for row, (epoch, number) in enumerate(zip(batch.epochs, batch.sample_ids, strict=True)):
        columns = np.flatnonzero(second[row])
        chosen = masks(len(columns), int(epoch), int(number))
        columns, sequences = columns[chosen >= 0], chosen[chosen >= 0]
        masked.append((ids[row, 0, columns], sequences * length + columns))
        ids[row, sequences, columns] = mask
    target = Target.of_rows(masked)
    if batch.readable is not None:
        target = target.without(~batch.readable)
    targets = {**batch.targets, MASKED: target}
    return replace(batch, input_ids=ids.reshape(batch.input_ids.shape), targets=targets)
