"""Word vectors: files of them, the vectors of a tokenizer's tokens, and the nearest words."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.task_files.contents import place, read_lines
from data_pipeline.tokenization.tokenizer import load, word_starts

MOST = 100_000  # the words that TinyBERT's code reads: the most frequent come first
UNKNOWN = "<unk>"
_HEADER = re.compile(r"(\d{1,9}) (\d{1,9})")


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
        """The first words of a file, as `read_entries` reads it."""
        words: list[str] = []
        rows: list[NDArray[np.float32]] = []
        for word, row in islice(read_entries(path), MOST):
            if word != UNKNOWN:
                words.append(word)
                rows.append(row)
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
        words = self._known[word, count]
        return [other.title() for other in words] if word.istitle() else words

    def nearest_to(
        self, vector: NDArray[np.float32], count: int, left_out: int | None = None
    ) -> list[str]:
        """The `count` words nearest to a vector [D], without the one with this number."""
        cosines = self._unit @ vector
        if left_out is not None:
            cosines[left_out] = -np.inf
        others = len(self.words) - (left_out is not None)
        order = np.argsort(-cosines, kind="stable")[: min(count, others)]
        return [self.words[number] for number in order.tolist()]


def read_entries(
    path: Path, beginnings: Collection[str] | None = None
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The words of a file in GloVe's or word2vec's text form: a word and its numbers on each line.

    The first line may be word2vec's, of two whole numbers: those of words and of dimensions.
    Otherwise its word holds no space; later words may. `beginnings` are the case-folded first parts
    of the words that are read, up to a space; None: all. Raises DataError, naming file and line,
    for a line of another form, and at the end of a file that holds fewer words than it says.
    """
    size, promised, number = 0, 0, 0  # the size of a vector is 0 until it is known
    for number, line in read_lines(str(path)):
        if number == 1 and (header := _HEADER.fullmatch(line.rstrip())):
            promised, size = int(header[1]), int(header[2])
            continue
        is_read = beginnings is None or line.partition(" ")[0].casefold() in beginnings
        if size and not is_read:
            continue
        word, row = _entry(line, size)
        if not len(row):
            wanted = f" {size}" if size else ""
            raise DataError(f"{place(str(path), number)}: must be a word and its{wanted} numbers")
        size = len(row)
        if is_read:
            yield word, row
    if 0 < number - 1 < promised:
        raise DataError(f"{path}: its first line says {promised} words, but it has {number - 1}")


def vector_size(path: Path) -> int:
    """The size of the vectors in a file. Raises DataError where it holds none."""
    entry = next(read_entries(path), None)
    if entry is None:
        raise DataError(f"{path}: holds no word vectors")
    return len(entry[1])


def token_vectors(path: Path, tokenizer_dir: Path) -> dict[int, NDArray[np.float32]]:
    """The vectors in a file of the tokens that begin a word, by the token's id.

    A token has the vector of the word that it spells; without that, of the first in the file that
    differs in capitals only. Special tokens have none.
    """
    tokenizer, vocabulary = load(tokenizer_dir)
    starts = word_starts(tokenizer, vocabulary)
    spelling = {
        number: tokenizer.decode([number]).strip()
        for number in vocabulary.ordinary.tolist()
        if starts[number]
    }
    by_word: dict[str, list[int]] = {}  # the tokens that spell a word, whatever their capitals
    for number, word in spelling.items():
        by_word.setdefault(word.casefold(), []).append(number)
    vectors: dict[int, NDArray[np.float32]] = {}
    exact: set[int] = set()
    for word, row in read_entries(path, by_word.keys()):
        for number in by_word.get(word.casefold(), ()):
            if spelling[number] == word and number not in exact:
                exact.add(number)
                vectors[number] = row
            else:
                vectors.setdefault(number, row)
    return vectors


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
