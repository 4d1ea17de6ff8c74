"""Documents, queries and relevance judgements as TREC, Cranfield and BEIR publish them."""

import html
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from data_pipeline.errors import DataError
from data_pipeline.task_files.contents import UTF_8, place, read_lines, read_text, source_name
from data_pipeline.task_files.tables import (
    JSONL,
    LAYOUTS,
    TABLES,
    column_names,
    is_table,
    read_table,
)
from data_pipeline.text.text_files import suffix_of

MOST_DIGITS = 6  # of a judgement
DOCUMENT_FIELDS = ("title", "text")
_TAG = re.compile(r"</?[A-Za-z][\w-]*(?:\s[^<>]*)?>")
_LABEL = re.compile(r"^\s*(?:Number|Topic):", re.I)


@dataclass(frozen=True)
class RetrievalText:
    """A document or a query."""

    where: str
    id: str
    text: str

    @property
    def is_blank(self) -> bool:
        """Whether it is a blank row, without id and text."""
        return not (self.id or self.text)


@dataclass(frozen=True)
class Judgement:
    """How relevant a document is to a query; 0 and less: not."""

    where: str
    query: str
    document: str
    relevance: int


def read_retrieval_documents(path: str, encoding: str = UTF_8) -> Iterator[RetrievalText]:
    """The documents of a file, in order, each with its title and text joined.

    TREC's ``<doc>`` with ``<docno>``, whatever the case of the tags; tables (.tsv, .csv, .jsonl,
    .parquet) with the columns ``_id`` or ``id``, ``text`` and perhaps ``title``, as BEIR's. Raises
    DataError.
    """
    if is_table(path):
        return _unique(path, _rows(path, DOCUMENT_FIELDS, encoding))
    return _unique(path, _tagged(path, "doc", "docno", DOCUMENT_FIELDS, encoding))


def read_queries(
    path: str, numbered_by_order: bool = False, encoding: str = UTF_8
) -> Iterator[RetrievalText]:
    """The queries of a file, in order: TREC's ``<top>`` with ``<num>`` and ``<title>``, or a table.

    A table has the columns ``_id`` or ``id``, and ``text``. With `numbered_by_order` the ids are 1,
    2, 3, ... whatever the file says, as Cranfield's judgements count them; a blank row has none.
    Raises DataError.
    """
    queries = _queries(path, encoding)
    if numbered_by_order:
        numbers = count(1)
        queries = (
            query if query.is_blank else replace(query, id=str(next(numbers))) for query in queries
        )
    return _unique(path, queries)


def _queries(path: str, encoding: str) -> Iterator[RetrievalText]:
    if is_table(path):
        return _rows(path, ("text",), encoding)
    return _tagged(path, "top", "num", ("title",), encoding)


def read_judgements(path: str, encoding: str = UTF_8) -> Iterator[Judgement]:
    """The judgements of a file: query, iteration, document and relevance, or without iteration.

    A header, as BEIR's files have one, is left out. Raises DataError.
    """
    empty = True
    for number, line in read_lines(path, encoding):
        cells = line.split()
        if not cells or (number == 1 and cells[-1].isalpha()):
            continue
        empty = False
        yield _judgement(place(path, number), cells)
    if empty:
        raise DataError(f"{path}: holds no judgements")


def _judgement(where: str, cells: list[str]) -> Judgement:
    if len(cells) not in (3, 4) or not re.fullmatch(r"-?\d+", cells[-1]):
        raise DataError(f"{where}: must be a query, an iteration, a document and a whole number")
    if len(cells[-1]) > MOST_DIGITS:  # pytrec_eval counts in 64 bits
        raise DataError(f"{where}: a relevance has at most {MOST_DIGITS} digits: {cells[-1][:20]}")
    return Judgement(where, cells[0], cells[-2], int(cells[-1]))


def _rows(path: str, fields: Sequence[str], encoding: str) -> Iterator[RetrievalText]:
    """The rows of a table; a field without a column is left out, unless it is the text.

    In JSON lines each record may have a title or not.
    """
    names, optional = column_names(path, encoding), [field for field in fields if field != "text"]
    is_json = LAYOUTS[suffix_of(path)] == JSONL
    present = [field for field in fields if field in names or field == "text" or is_json]
    id_column = "id" if "id" in names and "_id" not in names else "_id"
    columns = {"id": id_column, **{field: field for field in present}}
    for where, row in read_table(path, columns, encoding=encoding, optional=optional):
        yield RetrievalText(
            where, row.get("id", ""), _joined(row.get(field, "") for field in present)
        )


def _joined(parts: Iterator[str]) -> str:
    return "\n".join(part for part in parts if part)


def _unique(path: str, texts: Iterator[RetrievalText]) -> Iterator[RetrievalText]:
    seen: set[str] = set()
    for text in texts:
        if text.id in seen:
            raise DataError(f"{text.where}: the id {text.id!r} comes twice")
        if not text.is_blank:
            seen.add(text.id)
        yield text
    if not seen:
        raise DataError(f"{source_name(path)}: holds no documents or queries")


def _tagged(
    path: str, element: str, name: str, fields: Sequence[str], encoding: str
) -> Iterator[RetrievalText]:
    """Elements of a TREC file. Such files are no XML: tags may stay open, ``&`` stands alone."""
    text = read_text(path, encoding)
    opening = re.compile(rf"<{element}>(.*?)(?:</{element}>|(?=<{element}>)|\Z)", re.I | re.S)
    if not opening.search(text):
        raise DataError(f"{path}: has no <{element}>, and is no table: {', '.join(TABLES)}")
    line, counted = 1, 0
    for match in opening.finditer(text):
        line, counted = line + text.count("\n", counted, match.start()), match.start()
        where = place(path, line)
        identifier = _field(match[1], name)
        if not identifier:
            raise DataError(f"{where}: <{element}> has no <{name}>")
        yield RetrievalText(where, identifier, _text(match[1], name, fields))


def _text(element: str, name: str, fields: Sequence[str]) -> str:
    """The text of the fields; of an element without such tags, all but the field `name`."""
    if any(re.search(rf"<{field}>", element, re.I) for field in fields):
        return _joined(_field(element, field) for field in fields)
    rest = re.sub(rf"<{name}>.*?(?:</{name}>|(?=<)|\n|\Z)", " ", element, flags=re.I | re.S)
    return " ".join(html.unescape(_TAG.sub(" ", rest)).split())


def _field(element: str, name: str) -> str:
    """The text of the fields `name`; each ends at its closing tag, or where another field begins.

    Tags inside a field, as ``<p>`` in a closed ``<text>``, are left out.
    """
    parts = re.findall(rf"<{name}>(.*?)</{name}>", element, re.I | re.S)
    parts = parts or re.findall(rf"<{name}>(.*?)(?=<[A-Za-z]|\Z)", element, re.I | re.S)
    plain = " ".join(_TAG.sub(" ", part) for part in parts)
    return " ".join(html.unescape(_LABEL.sub("", plain)).split())
