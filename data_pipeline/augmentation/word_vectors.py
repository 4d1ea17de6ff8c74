"""Word vectors, and the words nearest to one by the cosine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.task_files.contents import place, read_lines

MOST = 100_000  # the words that TinyBERT's code reads: the most frequent come first
UNKNOWN = "<unk>"
_HEADER = re.compile(r"\d{1,9} (\d{1,9})")


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

        The first line may be fastText's, of two whole numbers: those of words and of dimensions.
        Otherwise its word holds no space; later words may. Raises DataError, naming file and line,
        for a line of another form.
        """
        words: list[str] = []
        rows: list[NDArray[np.float32]] = []
        size = 0  # of a vector; 0 until it is known
        for number, line in read_lines(str(path)):
            if number == 1 and (header := _HEADER.fullmatch(line.rstrip())):
                size = int(header[1])
                continue
            word, row = _entry(line, size)
            if not len(row):
                wanted = f" {size}" if size else ""
                raise DataError(
                    f"{place(str(path), number)}: must be a word and its{wanted} numbers"
                )
            size = len(row)
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


def _entry(line: str, size: int) -> tuple[str, NDArray[np.float32]]:
    """The word of a line and its last `size` numbers (0: all); none of a line of another form."""
    cells = line.rstrip().split(" ")
    first = len(cells) - size if size else 1
    try:
        row = np.array(cells[first:], np.float32)
    except ValueError:
        row = np.zeros(0, np.float32)
    if first < 1 or not np.isfinite(row).all():
        row = np.zeros(0, np.float32)
    return " ".join(cells[:first]), row
