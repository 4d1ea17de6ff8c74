"""Texts as token ids, and the encoded example that all tasks share, with its views.

Views are the forms in which learners read an example beside its full one. A view is made of an
example's segments. A view of pairs may mask tokens of the second text, which a model that reads
both then predicts (C-MLM, Chen et al., arXiv 1911.03829).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from data_pipeline.errors import EmptyText
from data_pipeline.hashing import MaskChoice, random_uint32, scalar_key
from data_pipeline.reading.batches import MASKED, Batch, Target
from data_pipeline.reading.corpus import Corpus
from data_pipeline.shards.blocks import token_dtype
from data_pipeline.tokenization.tokenizer import load, unknown_id, word_prefix


@dataclass(frozen=True)
class Windows:
    """Overlapping windows over `tokens` tokens of text, which begin `step` tokens apart."""

    tokens: int
    size: int
    step: int

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, max(1, self.tokens - self.size + self.step), self.step):
            yield slice(start, start + self.size)

    @cached_property
    def best_starts(self) -> NDArray[np.int64]:
        """Where the window begins that shows the most context of each token, on its poorer side."""
        starts, most = np.zeros(self.tokens, np.int64), np.full(self.tokens, -1.0)
        for window in self:
            inside = np.arange(window.start, min(window.stop, self.tokens))
            poorer = np.minimum(inside - window.start, inside[-1:] - inside)
            context = poorer + 0.01 * len(inside)
            better = inside[context > most[inside]]
            starts[better], most[better] = window.start, context[better - window.start]
        return starts


class TextEncoder:
    """Encodes the texts of examples with one tokenizer, and counts the examples that it cuts.

    cut: the places of these examples.
    """

    def __init__(self, tokenizer_dir: Path, length: int) -> None:
        """`length` is the longest sequence, special tokens included.

        Raises DataError when there is no tokenizer in the folder.
        """
        self.tokenizer_dir = tokenizer_dir
        self.tokenizer, self.vocabulary = load(tokenizer_dir)
        self.length = length
        self.cut: set[str] = set()
        self._dtype = token_dtype(self.vocabulary.vocab_size)

    def encode(self, text: str, place: str) -> tokenizers.Encoding:
        """The tokens of a text, with their places in it; EmptyText where it has none."""
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        if not len(encoding.ids):
            reason = "has no token of this tokenizer" if text.strip() else "is empty"
            raise EmptyText(f"{place}: a text {reason}; remove the example")
        return encoding

    def word(self, word: str) -> list[int]:
        """The tokens of one word of a sentence; the unknown token for a word that has none.

        They are those of the word in running text, so each word stands behind a space.
        """
        text = self._word_prefix + word
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids or [self._unknown]

    @cached_property
    def _word_prefix(self) -> str:
        return word_prefix(self.tokenizer)

    @cached_property
    def _unknown(self) -> int:
        """[MASK] stands for it where the tokenizer has none, as of bytes."""
        number = unknown_id(self.tokenizer)
        return self.vocabulary.mask if number is None else number

    def sequence(self, texts: Sequence[str], place: str) -> list[NDArray[np.integer]]:
        """The segments of one sequence, cut to fit: the longest text loses its last tokens first.

        A third text and those behind it belong to the second segment, each after a separator.
        """
        parts = [self.encode(text, place).ids for text in texts]
        separators = max(0, len(parts) - 2)
        sizes = [len(part) for part in parts]
        fitting = _cut(sizes, self.capacity(len(parts) - separators) - separators)
        if fitting != sizes:
            self.cut.add(place)
        parts = [part[:size] for part, size in zip(parts, fitting, strict=True)]
        for part in parts[2:]:
            parts[1] += [self.vocabulary.sep, *part]
        return [self.array(part) for part in parts[:2]]

    def cut_to_fit(
        self, ids: Sequence[int], labels: Sequence[int], place: str
    ) -> tuple[NDArray[np.integer], Sequence[int]]:
        """A sequence of one segment, and the labels of its tokens, without what does not fit."""
        room = self.capacity(1)
        return self.array(self.first(ids, room, place)), labels[:room]

    def first(self, ids: Sequence[int], room: int, place: str) -> Sequence[int]:
        """The first tokens of an example; it counts as cut where there are more."""
        if len(ids) > room:
            self.cut.add(place)
        return ids[:room]

    def capacity(self, segments: int) -> int:
        """The tokens of text that fit into a sequence of this many segments."""
        return self.length - self.vocabulary.special_in(segments)

    def array(self, ids: Sequence[int]) -> NDArray[np.integer]:
        """Ids as they are stored."""
        return np.array(ids, self._dtype)


def _cut(sizes: Sequence[int], room: int) -> list[int]:
    """Sizes with a sum of at most `room`: the longest are cut to one length, or nearly.

    What cannot be shared evenly goes to the longest, and among equal texts to the last of them
    (the library `tokenizers`, and the baseline of DREAM's authors).
    """
    left, fitting = room, [*sizes]
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    for rank, number in enumerate(order):
        fitting[number] = min(sizes[number], left // (len(sizes) - rank))
        left -= fitting[number]
    return fitting


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

    def dtype(self, target: str) -> np.dtype[Any]:
        """How a target is stored."""
        return np.dtype("<f4") if target in self.numbers else np.dtype("<i4")

    def to_json(self) -> dict[str, Any]:
        """Plain values, for the manifest."""
        lists = {name: [*getattr(self, name)] for name in ("segments", "numbers", "columns")}
        return {**asdict(self), **lists}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Layout:
        """The reverse of `to_json`."""
        lists = ("segments", "numbers", "columns")
        return cls(**{**tree, **{name: tuple(tree.get(name, ())) for name in lists}})


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
