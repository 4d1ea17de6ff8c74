"""Tagged and parsed sentences: CoNLL's columns, a word a line, with a blank line between sentences.

Or records with lists of words and tags, as `datasets` writes them, or raw text to be tagged.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, dropwhile, islice, pairwise

from configs.progress import counted
from data_pipeline.errors import DataError
from data_pipeline.task_files.contents import (
    UTF_8,
    not_empty,
    place,
    read_lines,
    source_name,
    texts_in,
    value_in,
)
from data_pipeline.task_files.tables import read_records
from data_pipeline.text.sentences import word_pattern

_log = logging.getLogger(__name__)
DOCUMENT_START = "-DOCSTART-"
LAST = -1  # the number of the last column
WORDS, TAGS = ("tokens", "words"), ("ner_tags", "tags", "labels")  # usual names of lists
TELLING_LINES = 64  # not blank, at the head of a file, which tell columns from raw text
MOST_COLUMNS = 14  # CoNLL 2009 has them
IN_COLUMNS = "columns, a word a line"
RAW = "raw text, a sentence a line; if it has columns, say where the words are: --column word=1"
CONLL_U_COLUMNS = 10
_CONLL_U_NUMBER = re.compile(r"[0-9]+([-.][0-9]+)?")
_ENTITY_TAG = re.compile(r"O|[BIESLUM]-\S+")
_TAG = re.compile(r"O|[BIESLUM]-\S+|[A-Z]+[-A-Z0-9$_]*|[^\w\s]+")
_INSIDE_WORDS = "-.'\u2019"
_GAP = re.compile(r"[ \t]+")


@dataclass(frozen=True)
class TaggedSentence:
    """The words of a sentence, and the tag of each as in the file; none where none are read."""

    where: str  # its first word
    words: tuple[str, ...]
    tags: tuple[str, ...]

    @property
    def is_blank(self) -> bool:
        """Whether it has no words, as a blank record."""
        return not self.words


def read_conll(
    path: str, word: int | None = None, tag: int | None = LAST, encoding: str = UTF_8
) -> Iterator[TaggedSentence]:
    """The sentences of a file. Columns are numbered from 1; with `tag` None, tags are not read.

    Words are in the first column, or `word`, and tags in the last one. Where the first column
    numbers the words, as in GermEval, they are in the second, and their tags in the third where
    these are of entities; a warning says so.
    Columns are separated by tabs, in lines that hold one, or by spaces. Lines of ``-DOCSTART-`` are
    left out. So are CoNLL-U's comments (``# text = ...``) before a sentence, and its lines that
    hold no word of the sentence: ``2-3``, how words 2 and 3 are written together, and ``4.1``, a
    word that is not written. Raises DataError for a file without words, a line with too few
    columns, and a sentence whose lines have unequal columns.
    """
    return _tagged(path, read_lines(path, encoding), word, tag)


def read_tagged_records(
    path: str,
    word: str | None = None,
    tag: str | None = None,
    labelled: bool = True,
    encoding: str = UTF_8,
) -> Iterator[TaggedSentence]:
    """The sentences of JSON lines, JSON or Parquet; `word` and `tag` name the lists, if given.

    A blank record is a sentence without words.
    """
    for where, record in read_records(path, encoding):
        if not record:
            yield TaggedSentence(where, (), ())
            continue
        words = texts_in(record, _key(record, word, WORDS), where)
        tags: tuple[str, ...] = ()
        if labelled:
            key = tag_column(record, tag)
            values = value_in(record, key, list, where)
            if len(values) != len(words) or not all(
                isinstance(value, str | int) for value in values
            ):
                raise DataError(f"{where}: {key}: must be a list with a tag for each word")
            tags = tuple(map(str, values))
        yield TaggedSentence(where, words, tags)


def read_untagged(
    path: str,
    word: int | None,
    labels: Collection[str],
    encoding: str = UTF_8,
    has_columns: bool | None = None,
) -> Iterator[TaggedSentence]:
    """The sentences of a file to be tagged: of columns as in `read_conll`, or raw text.

    Each line of raw text is a sentence, which is split into words and punctuation; so a blank line
    is one without words. Unless the user says whether it `has_columns`, the first lines tell, see
    `_has_columns`, and a warning says which it is. `labels` are those of the model. Holds no more
    than these lines; the first of raw text is a sentence before the second is read.
    """
    lines = read_lines(path, encoding)
    first: list[tuple[int, str]] = []
    if has_columns is None:
        first = _telling(lines, labels)
        if not first:
            raise DataError(f"{source_name(path)}: holds no words")
        has_columns = _has_columns([line for _, line in first], labels)
        _log.warning("%s: read as %s", source_name(path), IN_COLUMNS if has_columns else RAW)
    if has_columns:
        yield from _tagged(path, chain(first, lines), word, None)
        return
    for number, line in chain(first, lines):
        words = word_pattern(_INSIDE_WORDS, signs=True).findall(line)
        yield TaggedSentence(place(path, number), tuple(words), ())


def _telling(lines: Iterator[tuple[int, str]], labels: Collection[str]) -> list[tuple[int, str]]:
    """The lines that tell columns from raw text, up to the first that only one of them has."""
    first: list[tuple[int, str]] = []
    for number, line in lines:
        first.append((number, line))
        seen = [line for _, line in first if _counts(line)]
        if seen and (_is_certain(line) or not _may_be_columns(seen[0], labels)):
            break
        if len(seen) == TELLING_LINES:
            break
    return first


def _counts(line: str) -> bool:
    """Whether a line tells anything: neither a blank one nor one of CoNLL-U's comments does."""
    return bool(line.strip()) and not line.startswith("# ")


def _is_certain(line: str) -> bool:
    return "\t" in line or line.startswith(DOCUMENT_START)


def _may_be_columns(line: str, labels: Collection[str]) -> bool:
    cells = line.split()
    return _is_certain(line) or len(cells) == 1 or _is_tag(cells[-1], labels)


def _is_tag(cell: str, labels: Collection[str]) -> bool:
    return cell in labels or _TAG.fullmatch(cell) is not None


def _has_columns(lines: Sequence[str], labels: Collection[str]) -> bool:
    """Whether the first lines of a file are those of columns.

    They are with a tab or ``-DOCSTART-``, with a word a line, and where most lines end in a label
    of the model or a tag of entities. Lines that end in other capitals, as tags of parts of speech,
    may be sentences that end in an abbreviation, so these must have as many cells each, at most
    `MOST_COLUMNS`, and stand in groups with blank lines between them.
    """
    rows = [line.split() for line in lines if _counts(line)]
    if any(map(_is_certain, lines)) or {len(row) for row in rows} == {1}:
        return True
    ends = [row[-1] for row in rows if len(row) > 1]
    if 2 * sum(end in labels or _ENTITY_TAG.fullmatch(end) is not None for end in ends) > len(rows):
        return True
    widths = {len(row) for row in rows}
    is_grouped = any(line.strip() and other.strip() for line, other in pairwise(lines)) and any(
        not line.strip() for line in lines[:-1]
    )
    is_narrow = len(widths) == 1 and max(widths, default=0) <= MOST_COLUMNS
    return is_grouped and is_narrow and all(_is_tag(end, labels) for end in ends)


def tag_column(columns: Collection[str], named: str | None = None) -> str:
    """The column of the tags in records with these columns: `named`, or one that is usual."""
    return _key(columns, named, TAGS)


def _key(record: Collection[str], named: str | None, usual: Sequence[str]) -> str:
    return named or next((key for key in usual if key in record), usual[0])


@dataclass(frozen=True)
class _Columns:
    """Where words and tags are in the rows of a file; tag: None where none are read."""

    word: int = 1
    tag: int | None = LAST

    @property
    def needed(self) -> int:
        return max(self.word, 1 if self.tag is None else 2, self.tag or 0)

    def of_numbered(self, rows: Sequence[Sequence[str]]) -> _Columns:
        """The columns of a file whose first numbers the words; `rows` are some of its words."""
        third = [row[2] for row in rows if len(row) > 3]
        is_entity = len(third) == len(rows) and all(map(_ENTITY_TAG.fullmatch, third))
        return _Columns(2, 3 if self.tag == LAST and is_entity else self.tag)

    def sentence(self, path: str, lines: Sequence[tuple[int, str]]) -> TaggedSentence:
        """The sentence in these lines. Raises DataError for too few or unequal columns."""
        rows = [_cells(line, place(path, number), self.needed) for number, line in lines]
        for (number, _), row in zip(lines, rows, strict=True):
            if len(row) != len(rows[0]):
                columns = counted(len(row), "column")
                why = f"has {columns}, where its sentence begins with {len(rows[0])}"
                raise DataError(f"{place(path, number)}: {why}; separate columns by tabs")
        words = tuple(row[self.word - 1] for row in rows)
        column = self.tag if self.tag is None or self.tag == LAST else self.tag - 1
        tags = () if column is None else tuple(row[column] for row in rows)
        return TaggedSentence(place(path, lines[0][0]), words, tags)


def _tagged(
    path: str, all_lines: Iterator[tuple[int, str]], word: int | None, tag: int | None
) -> Iterator[TaggedSentence]:
    sentences = _sentences(all_lines)
    columns = _Columns(word or 1, tag)
    # The first sentence of several words tells whether they are numbered.
    first = [*islice(_up_to_words(sentences), 0 if word else TELLING_LINES)]
    rows = [_split(line) for _, line in first[-1]] if first else []
    if _are_numbered(rows):
        columns = columns.of_numbered(rows)
        _tell_columns(path, columns)
    for lines in not_empty(chain(first, sentences), path, "words"):
        yield columns.sentence(path, lines)


def _up_to_words(sentences: Iterator[list[tuple[int, str]]]) -> Iterator[list[tuple[int, str]]]:
    """The first sentences, up to one of several words."""
    for lines in sentences:
        yield lines
        if len(lines) > 1:
            return


def _are_numbered(rows: Sequence[Sequence[str]]) -> bool:
    """Whether the rows of a sentence begin with 1, 2 and so on, or 0, 1, and hold more."""
    numbers = [row[0] for row in rows]
    starts = ([*map(str, range(start, len(rows) + start))] for start in (0, 1))
    return len(rows) > 1 and min(map(len, rows)) > 1 and numbers in starts


@cache  # a file is read several times
def _tell_columns(path: str, columns: _Columns) -> None:
    tags = "the last one" if columns.tag == LAST else f"column {columns.tag}"
    read = "words from column 2" + (f", tags from {tags}" if columns.tag else "")
    _log.warning(
        "%s: column 1 numbers the words: reads %s; data.columns, or --column, names others",
        *(source_name(path), read),
    )


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
    for lines in not_empty(_sentences(read_lines(path)), path, "words"):
        words = tuple(_parsed(line, place(path, number), len(lines)) for number, line in lines)
        yield place(path, lines[0][0]), words


def _parsed(line: str, where: str, words: int) -> ParsedWord:
    cells = line.split("\t")
    if len(cells) != CONLL_U_COLUMNS:
        raise DataError(
            f"{where}: has {counted(len(cells), 'column')}; CoNLL-U has {CONLL_U_COLUMNS}, "
            "with tabs"
        )
    form, tag, features, head, relation = (cells[column].strip() for column in (1, 3, 5, 6, 7))
    if not head.isdecimal() or len(head) > 9 or int(head) > words:
        raise DataError(
            f"{where}: HEAD: {head!r} is neither a word of its sentence nor 0; parse the file"
        )
    return ParsedWord(
        form, tag, tuple(features.split("|")), int(head) - 1 if int(head) else None, relation
    )


def _sentences(all_lines: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """The lines of each sentence's words, with their numbers."""
    lines: list[tuple[int, str]] = []
    for number, line in chain(all_lines, [(0, "")]):
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
    return [*dropwhile(lambda line: _is_comment(line[1], last), lines)]


def _is_comment(line: str, last: str) -> bool:
    """Whether a line is a comment of CoNLL-U or GermEval, and not the word # with its columns.

    A comment has ``=`` in third place, or another form than the `last` line of the sentence.
    """
    if not line.startswith(("# ", "#\t")):
        return False
    cells = _split(line)
    is_other = ("\t" in line) != ("\t" in last) or len(cells) != len(_split(last))
    return is_other or cells[2:3] == ["="]


def _split(line: str) -> list[str]:
    return line.split("\t") if "\t" in line else _GAP.split(line.strip())


def _cells(line: str, where: str, needed: int) -> list[str]:
    cells = [cell.strip() for cell in _split(line)]
    if len(cells) < needed or not all(cells):
        columns = "one column" if needed == 1 else f"{needed} columns"
        raise DataError(f"{where}: must have {columns} or more, none of them empty")
    return cells
