"""Tagged sentences: CoNLL's columns, a word a line, with a blank line between sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from data_pipeline.errors import DataError
from data_pipeline.task_files.contents import UTF_8, place, read_lines

DOCUMENT_START = "-DOCSTART-"
LAST = -1  # the number of the last column
_GAP = re.compile(r"[ \t]+")


@dataclass(frozen=True)
class TaggedSentence:
    """The words of a sentence, and the tag of each as in the file; none where none are read."""

    where: str  # its first word
    words: tuple[str, ...]
    tags: tuple[str, ...]


def read_conll(
    path: str, word: int = 1, tag: int | None = LAST, encoding: str = UTF_8
) -> Iterator[TaggedSentence]:
    """The sentences of a file. Columns are numbered from 1; with `tag` None, tags are not read.

    Columns are separated by tabs, in lines that hold one, or by spaces; lines of ``-DOCSTART-``
    are left out. Raises DataError for a file without words and a line with too few columns.
    """
    start, words, tags = 0, list[str](), list[str]()
    needed = max(word, 1 if tag is None else 2, tag or 0)
    empty = True
    for number, line in chain(read_lines(path, encoding), [(0, "")]):
        if line.strip() and not line.startswith(DOCUMENT_START):
            cells = _cells(line, place(path, number), needed)
            start = start or number
            words.append(cells[word - 1])
            if tag is not None:
                tags.append(cells[tag if tag == LAST else tag - 1])
        elif words:
            empty = False
            yield TaggedSentence(place(path, start), tuple(words), tuple(tags))
            start, words, tags = 0, [], []
    if empty:
        raise DataError(f"{path}: holds no words")


def _cells(line: str, where: str, needed: int) -> list[str]:
    cells = line.split("\t") if "\t" in line else _GAP.split(line.strip())
    cells = [cell.strip() for cell in cells]
    if len(cells) < needed or not all(cells):
        raise DataError(f"{where}: must have {needed} columns or more, none of them empty")
    return cells
