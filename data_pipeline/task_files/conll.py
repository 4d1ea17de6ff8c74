"""Tagged and parsed sentences: CoNLL's columns, a word a line, a blank line between sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, dropwhile

from data_pipeline.errors import DataError
from data_pipeline.task_files.contents import UTF_8, place, read_lines, source_name

DOCUMENT_START = "-DOCSTART-"
LAST = -1  # the number of the last column
CONLL_U_COLUMNS = 10
_CONLL_U_NUMBER = re.compile(r"[0-9]+([-.][0-9]+)?")
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

    Columns are separated by tabs, in lines that hold one, or by spaces. Lines of ``-DOCSTART-`` are
    left out. So are CoNLL-U's comments (``# text = ...``) before a sentence, and its lines that
    hold no word of the sentence: ``2-3``, how words 2 and 3 are written together, and ``4.1``, a
    word that is not written. Raises DataError for a file without words and a line with too few
    columns.
    """
    needed = max(word, 1 if tag is None else 2, tag or 0)
    empty = True
    for lines in _sentences(path, encoding):
        rows = [_cells(line, place(path, number), needed) for number, line in lines]
        words = tuple(row[word - 1] for row in rows)
        column = tag if tag is None or tag == LAST else tag - 1
        tags = () if column is None else tuple(row[column] for row in rows)
        empty = False
        yield TaggedSentence(place(path, lines[0][0]), words, tags)
    if empty:
        raise DataError(f"{source_name(path)}: holds no words")


@dataclass(frozen=True)
class ParsedWord:
    """A word of a parsed sentence: CoNLL-U's columns FORM, UPOS, FEATS, HEAD and DEPREL.

    head: the index of the word that it depends on; None for a sentence's root.
    """

    form: str
    tag: str
    features: tuple[str, ...]
    head: int | None
    relation: str


def read_parsed(path: str) -> Iterator[tuple[str, tuple[ParsedWord, ...]]]:
    """(where it begins, words) of each sentence of a CoNLL-U file. Raises DataError."""
    empty = True
    for lines in _sentences(path, UTF_8):
        empty = False
        words = tuple(_parsed(line, place(path, number), len(lines)) for number, line in lines)
        yield place(path, lines[0][0]), words
    if empty:
        raise DataError(f"{source_name(path)}: holds no words")


def _parsed(line: str, where: str, words: int) -> ParsedWord:
    cells = line.split("\t")
    if len(cells) != CONLL_U_COLUMNS:
        raise DataError(
            f"{where}: has {len(cells)} columns; CoNLL-U has {CONLL_U_COLUMNS}, with tabs"
        )
    form, tag, features, head, relation = (cells[column].strip() for column in (1, 3, 5, 6, 7))
    if not head.isdecimal() or len(head) > 9 or int(head) > words:
        raise DataError(
            f"{where}: HEAD: {head!r} is no word of its sentence, nor 0; parse the file"
        )
    return ParsedWord(
        form, tag, tuple(features.split("|")), int(head) - 1 if int(head) else None, relation
    )


def _sentences(path: str, encoding: str) -> Iterator[list[tuple[int, str]]]:
    """The lines of each sentence's words, with their numbers."""
    lines: list[tuple[int, str]] = []
    for number, line in chain(read_lines(path, encoding), [(0, "")]):
        if line.strip() and not line.startswith(DOCUMENT_START):
            lines.append((number, line))
            continue
        if words := _words(_without_comments(lines)):
            yield words
        lines = []


def _words(lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """The lines that hold a word; in CoNLL-U, the others have a number like 2-3 or 4.1."""
    rows = [line.split("\t") for _, line in lines]
    if not all(len(row) == CONLL_U_COLUMNS and _CONLL_U_NUMBER.fullmatch(row[0]) for row in rows):
        return lines
    return [line for line, row in zip(lines, rows, strict=True) if row[0].isdecimal()]


def _without_comments(lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
    last = lines[-1][1] if lines else ""
    return [*dropwhile(lambda one: _is_comment(one[1], last), lines)]


def _is_comment(line: str, last: str) -> bool:
    """Whether a line is a comment of CoNLL-U, and not the word # with its columns.

    A comment has ``=`` in third place, or another form than the `last` line of the sentence.
    """
    if not line.startswith("# "):
        return False
    cells = _split(line)
    is_other = ("\t" in line) != ("\t" in last) or len(cells) != len(_split(last))
    return is_other or cells[2:3] == ["="]


def _split(line: str) -> list[str]:
    return line.split("\t") if "\t" in line else _GAP.split(line.strip())


def _cells(line: str, where: str, needed: int) -> list[str]:
    cells = [cell.strip() for cell in _split(line)]
    if len(cells) < needed or not all(cells):
        raise DataError(f"{where}: must have {needed} columns or more, none of them empty")
    return cells
