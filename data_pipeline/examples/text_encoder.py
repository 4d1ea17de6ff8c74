"""Texts as token ids, cut to what fits into a sequence, or read in overlapping windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from data_pipeline.errors import EmptyText
from data_pipeline.shards.blocks import token_dtype
from data_pipeline.tokenization.tokenizer import load, word_prefix


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
        token = getattr(self.tokenizer.model, "unk_token", None)
        number = None if token is None else self.tokenizer.token_to_id(token)
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

    What cannot be shared evenly goes to the first of two texts (BERT's run_classifier.py and
    `transformers`), and to the last of three (the baseline of DREAM's authors).
    """
    left, fitting = room, [*sizes]
    ties = -1 if len(sizes) == 2 else 1
    order = sorted(range(len(sizes)), key=lambda number: (sizes[number], ties * number))
    for rank, number in enumerate(order):
        fitting[number] = min(sizes[number], left // (len(sizes) - rank))
        left -= fitting[number]
    return fitting
