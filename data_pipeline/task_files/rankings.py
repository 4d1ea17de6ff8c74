"""Rankings of documents for queries: runs in TREC's form, and what `tandem predict` writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.task_files.contents import UTF_8, parse_json, place, read_lines, source_name
from data_pipeline.task_files.tables import as_number
from data_pipeline.text.text_files import suffix_of

JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class RankedDocument:
    """A document that was found for a query; a higher score comes first."""

    where: str
    query: str
    document: str
    score: float


def read_ranking(path: str, encoding: str = UTF_8) -> Iterator[RankedDocument]:
    """What a run found, in the order of the file.

    TREC's lines (query, Q0, document, rank, score, tag), of which the rank is not read; or JSON
    lines ``{"query": ..., "documents": [{"id": ..., "score": ...}, ...]}``. Raises DataError.
    """
    read = _json_lines if suffix_of(path) in JSON_LINES else _trec_lines
    empty = True
    for ranked in read(path, encoding):
        empty = False
        yield ranked
    if empty:
        raise DataError(f"{source_name(path)}: holds no ranked documents")


def _trec_lines(path: str, encoding: str) -> Iterator[RankedDocument]:
    for number, line in read_lines(path, encoding):
        cells, where = line.split(), place(path, number)
        if not cells:
            continue
        if len(cells) != 6:
            raise DataError(f"{where}: must be a query, Q0, a document, a rank, a score and a tag")
        yield RankedDocument(where, cells[0], cells[2], as_number(where, "score", cells[4]))


def _json_lines(path: str, encoding: str) -> Iterator[RankedDocument]:
    for number, line in read_lines(path, encoding):
        if line.strip():
            where = place(path, number)
            yield from _of_record(where, parse_json(line, path, number))


def _of_record(where: str, record: Any) -> Iterator[RankedDocument]:
    try:
        query = str(record["query"])
        found = [(one["id"], one["score"]) for one in record["documents"]]
    except (TypeError, KeyError):
        form = '{"query": ..., "documents": [{"id": ..., "score": ...}, ...]}'
        raise DataError(f"{where}: must be {form}") from None
    for document, score in found:
        yield RankedDocument(where, query, str(document), as_number(where, "score", str(score)))
