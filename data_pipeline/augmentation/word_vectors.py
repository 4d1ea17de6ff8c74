"""Word vectors, and the words nearest to one by the cosine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.task_files.contents import place, read_lines

MOST = 100_000  # the words that TinyBERT's code reads: the most frequent come first
UNKNOWN = "<unk>"


class WordVectors:
    """Words with their vectors: [words, D] float32."""

    def __init__(self, words: Sequence[str], vectors: NDArray[np.float32]) -> None:
        self.words = list(words)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        self._unit = vectors / np.where(lengths, lengths, 1.0)
        self._numbers = {word: number for number, word in enumerate(self.words)}
        self._known: dict[tuple[str, int], list[str]] = {}

    @classmethod
    def read(cls, path: Path) -> WordVectors:
        """The first words of a file in GloVe's format: a word and its numbers on each line.

        Raises DataError, naming file and line, for a line of another form.
        """
        words: list[str] = []
        rows: list[NDArray[np.float32]] = []
        for number, line in read_lines(str(path)):
            word, *numbers = line.rstrip().split(" ")
            try:
                row = np.array(numbers, np.float32)
            except ValueError:
                row = np.zeros(0, np.float32)
            if not len(row) or (rows and len(row) != len(rows[0])) or not np.isfinite(row).all():
                wanted = f" {len(rows[0])}" if rows else ""
                raise DataError(
                    f"{place(str(path), number)}: must be a word and its{wanted} numbers"
                )
            if word != UNKNOWN:
                words.append(word)
                rows.append(row)
            if number == MOST:
                break
        if not words:
            raise DataError(f"{path}: holds no word vectors")
        return cls(words, np.stack(rows))

    def nearest(self, word: str, count: int) -> list[str]:
        """The `count` words nearest to a word, without itself; none of an unknown word.

        They begin with capitals where the word does.
        """
        number = self._numbers.get(word)
        if number is None:
            return []
        if (word, count) not in self._known:
            self._known[word, count] = self.nearest_to(self._unit[number], count, number)
        found = self._known[word, count]
        return [one.title() for one in found] if word.istitle() else found

    def nearest_to(
        self, vector: NDArray[np.float32], count: int, left_out: int | None = None
    ) -> list[str]:
        """The `count` words nearest to a vector [D], without the one with this number."""
        cosines = self._unit @ vector
        if left_out is not None:
            cosines[left_out] = -np.inf
        order = np.argsort(-cosines, kind="stable")[: min(count, len(self.words) - 1)]
        return [self.words[one] for one in order.tolist()]
