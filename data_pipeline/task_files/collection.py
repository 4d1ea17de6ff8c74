"""A collection for retrieval: its documents and queries by number, judgements and runs of them.

Documents and queries are numbered from 0, in the order of their files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from data_pipeline.errors import DataError
from data_pipeline.hashing import scalar_key
from data_pipeline.task_files import contents
from data_pipeline.task_files.contents import Dropped
from data_pipeline.task_files.retrieval import (
    Judgement,
    RetrievalText,
    read_judgements,
    read_queries,
    read_retrieval_documents,
)
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


def read_ranking(path: str, encoding: str = contents.UTF_8) -> Iterator[RankedDocument]:
    """The ranked documents of a run, in the order of the file.

    TREC's lines (query, Q0, document, rank, score, tag), of which the rank is not read; or JSON
    lines ``{"query": ..., "documents": [{"id": ..., "score": ...}, ...]}``. Raises DataError.
    """
    read = _json_lines if suffix_of(path) in JSON_LINES else _trec_lines
    return contents.not_empty(read(path, encoding), path, "ranked documents")


def _trec_lines(path: str, encoding: str) -> Iterator[RankedDocument]:
    for number, line in contents.read_lines(path, encoding):
        cells, where = line.split(), contents.place(path, number)
        if not cells:
            continue
        if len(cells) != 6:
            raise DataError(f"{where}: must be a query, Q0, a document, a rank, a score and a tag")
        yield RankedDocument(where, cells[0], cells[2], as_number(where, "score", cells[4]))


def _json_lines(path: str, encoding: str) -> Iterator[RankedDocument]:
    for number, line in contents.read_lines(path, encoding):
        if line.strip():
            where = contents.place(path, number)
            yield from _of_record(where, contents.parse_json(line, path, number))


def _of_record(where: str, record: Any) -> Iterator[RankedDocument]:
    try:
        query = str(record["query"])
        ranked = [(document["id"], document["score"]) for document in record["documents"]]
    except (TypeError, KeyError):
        form = '{"query": ..., "documents": [{"id": ..., "score": ...}, ...]}'
        raise DataError(f"{where}: must be {form}") from None
    for document, score in ranked:
        yield RankedDocument(where, query, str(document), as_number(where, "score", str(score)))


Relevance = Mapping[int, Mapping[int, int]]  # of documents, by query and document
Number = TypeVar("Number", int, float)
Ranking = Mapping[int, Mapping[int, float]]  # the scores of documents, by query and document

# What a message about an unknown query says of the ids of those that are there.
COUNTED = "; its queries are counted 1, 2, 3, ..."
_AS_NAMED = "; where queries are counted 1, 2, 3, ... set numbered_by_order: true"


@dataclass(frozen=True)
class Collection:
    """Documents and queries, with the names of their files for messages.

    `ids` is what a message adds about the ids of the queries.
    """

    documents: Sequence[RetrievalText]
    queries: Sequence[RetrievalText]
    names: tuple[str, str]
    ids: str = ""
    encoding: str = contents.UTF_8

    @classmethod
    def read(
        cls,
        documents: str,
        queries: str,
        numbered_by_order: bool = False,
        encoding: str = contents.UTF_8,
    ) -> Collection:
        """Both files of a task; the last argument as in `read_queries`. Raises DataError."""
        ids = COUNTED if numbered_by_order else _AS_NAMED
        texts = present_in(queries, read_queries(queries, numbered_by_order, encoding))
        return cls.of(documents, texts, queries, ids, encoding)

    @classmethod
    def of(
        cls,
        documents: str,
        queries: Iterable[RetrievalText],
        source: str,
        ids: str = "",
        encoding: str = contents.UTF_8,
    ) -> Collection:
        """The documents of a file, blank rows left out, and queries of a `source`.

        Raises DataError.
        """
        names = documents, contents.source_name(source)
        texts = present_in(documents, read_retrieval_documents(documents, encoding))
        return cls(texts, [*queries], names, ids, encoding)

    def relevance(self, path: str) -> Relevance:
        """The judgements of a file. Raises DataError, with the line, for an unknown id."""
        judgements: dict[int, dict[int, int]] = {}
        for judgement in read_judgements(path, self.encoding):
            query, document = self._pair(judgement)
            known = judgements.setdefault(query, {}).setdefault(document, judgement.relevance)
            if known != judgement.relevance:
                pair = f"document {judgement.document!r} for query {judgement.query!r}"
                raise DataError(f"{judgement.where}: judges {pair} a second time, and differently")
        if not any(is_relevant(value) for ones in judgements.values() for value in ones.values()):
            raise DataError(f"{path}: judges no document relevant; relevance must be above 0")
        return judgements

    def ranking(self, path: str) -> Ranking:
        """The run in a file.

        Raises DataError, with the line, for an unknown id, and for a second score of a document.
        """
        scores: dict[int, dict[int, float]] = {}
        for ranked in read_ranking(path, self.encoding):
            query, document = self._pair(ranked)
            known = scores.setdefault(query, {}).setdefault(document, ranked.score)
            if known != ranked.score:
                why = f"ranks document {ranked.document!r} for query {ranked.query!r} a second time"
                raise DataError(f"{ranked.where}: {why}, with another score; remove one of them")
        return scores

    @cached_property
    def readable(self) -> list[int]:
        """The documents that have a text; nothing can find the others."""
        return [number for number, document in enumerate(self.documents) if document.text]

    @cached_property
    def _numbers(self) -> tuple[dict[str, int], dict[str, int]]:
        documents = {document.id: number for number, document in enumerate(self.documents)}
        return documents, {query.id: number for number, query in enumerate(self.queries)}

    def _pair(self, line: Judgement | RankedDocument) -> tuple[int, int]:
        """The numbers of the query and the document that a line is about."""
        documents, queries = self._numbers
        if line.query not in queries:
            raise DataError(f"{line.where}: {self.names[1]} has no query {line.query!r}{self.ids}")
        if line.document not in documents:
            raise DataError(f"{line.where}: {self.names[0]} has no document {line.document!r}")
        return queries[line.query], documents[line.document]


def present_in(path: str, texts: Iterable[RetrievalText]) -> list[RetrievalText]:
    """The texts of a file that are not blank; the others are counted."""
    dropped = Dropped()
    present = [*dropped.present(texts)]
    dropped.tell(path)
    return present


@dataclass(frozen=True)
class TrainingGroup:
    """A query, a document that is relevant to it, and others that are not; all by number."""

    query: int
    positive: int
    negatives: tuple[int, ...]
    relevant: tuple[int, ...]  # all that are relevant to the query, ascending


def best_first(scores: Mapping[int, float], count: int) -> dict[int, float]:
    """The `count` documents with the highest scores, the highest first."""
    ordered = sorted(scores, key=lambda document: (-scores[document], document))
    return {document: scores[document] for document in ordered[:count]}


def triples(values: Mapping[int, Mapping[int, Number]]) -> list[tuple[int, int, Number]]:
    """(query, document, value) of every value: JSON, which has no numbers as keys."""
    return [
        (query, document, value)
        for query, ones in values.items()
        for document, value in ones.items()
    ]


def by_query(rows: Iterable[tuple[int, int, Number]]) -> dict[int, dict[int, Number]]:
    """The reverse of `triples`."""
    values: dict[int, dict[int, Number]] = {}
    for query, document, value in rows:
        values.setdefault(query, {})[document] = value
    return values


def is_relevant(relevance: int) -> bool:
    """Whether a judgement of this value says so."""
    return relevance > 0


def training_groups(
    collection: Collection, relevance: Relevance, listed: Ranking, negatives: int
) -> Iterator[TrainingGroup]:
    """A group for each relevant document of each query, by ascending numbers.

    A query's negatives are those judged irrelevant, then those `listed` for it, the best first: its
    groups take them in turn. Where they do not suffice, other documents are drawn, as a pure
    function of the numbers. Queries and documents without a text are left out.
    """
    readable = set(collection.readable)
    for query, judged in sorted(relevance.items()):
        if not collection.queries[query].text:
            continue
        relevant = tuple(
            sorted(document for document, value in judged.items() if is_relevant(value))
        )
        positives = [document for document in relevant if document in readable]
        pool = [
            document for document in _listed(judged, listed.get(query, {})) if document in readable
        ]
        for turn, positive in enumerate(positives):
            taken = _in_turn(pool, turn, negatives)
            drawn = _drawn(
                collection, {*positives, *taken}, (query, positive), negatives - len(taken)
            )
            yield TrainingGroup(query, positive, (*taken, *drawn), relevant)


def _listed(judged: Mapping[int, int], ranked: Mapping[int, float]) -> Iterator[int]:
    """The negatives that are listed for a query, each once."""
    irrelevant = [document for document, value in judged.items() if not is_relevant(value)]
    by_score = [document for document in best_first(ranked, len(ranked)) if document not in judged]
    yield from dict.fromkeys([*sorted(irrelevant), *by_score])


def _in_turn(pool: Sequence[int], turn: int, count: int) -> list[int]:
    size = len(pool)
    return [pool[(turn * count + offset) % size] for offset in range(min(count, size))]


def _drawn(
    collection: Collection, others: set[int], key: tuple[int, int], count: int
) -> Iterator[int]:
    """`count` readable documents but the `others`, also readable; DataError if there are fewer."""
    readable = collection.readable
    if count > len(readable) - len(others):
        raise DataError(f"{collection.names[0]}: has too few documents for negatives: {count}")
    attempt, taken = 0, set(others)
    while count:
        number = readable[scalar_key(*key, attempt) % len(readable)]
        attempt += 1
        if number not in taken:
            taken.add(number)
            count -= 1
            yield number
