"""A collection for retrieval: its documents and queries by number, and what is said about them.

Documents and queries are numbered from 0, in the order of their files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from data_pipeline.errors import DataError
from data_pipeline.hashing import scalar_key
from data_pipeline.task_files.contents import UTF_8, source_name
from data_pipeline.task_files.dropped import Dropped
from data_pipeline.task_files.rankings import RankedDocument, read_ranking
from data_pipeline.task_files.retrieval import (
    Judgement,
    RetrievalText,
    read_judgements,
    read_queries,
    read_retrieval_documents,
)

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
    encoding: str = UTF_8

    @classmethod
    def read(
        cls,
        documents: str,
        queries: str,
        numbered_by_order: bool = False,
        encoding: str = UTF_8,
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
        encoding: str = UTF_8,
    ) -> Collection:
        """The documents of a file, blank rows left out, and queries of a `source`.

        Raises DataError.
        """
        names = documents, source_name(source)
        texts = present_in(documents, read_retrieval_documents(documents, encoding))
        return cls(texts, [*queries], names, ids, encoding)

    def relevance(self, path: str) -> Relevance:
        """The judgements of a file. Raises DataError, with the line, for an unknown id."""
        found: dict[int, dict[int, int]] = {}
        for one in read_judgements(path, self.encoding):
            query, document = self._pair(one)
            known = found.setdefault(query, {}).setdefault(document, one.relevance)
            if known != one.relevance:
                why = f"judges document {one.document!r} for query {one.query!r} a second time"
                raise DataError(f"{one.where}: {why}, and differently")
        if not any(is_relevant(value) for ones in found.values() for value in ones.values()):
            raise DataError(f"{path}: judges no document relevant; relevance must be above 0")
        return found

    def ranking(self, path: str) -> Ranking:
        """The run in a file.

        Raises DataError, with the line, for an unknown id, and for a second score of a document.
        """
        found: dict[int, dict[int, float]] = {}
        for one in read_ranking(path, self.encoding):
            query, document = self._pair(one)
            known = found.setdefault(query, {}).setdefault(document, one.score)
            if known != one.score:
                why = f"ranks document {one.document!r} for query {one.query!r} a second time"
                raise DataError(f"{one.where}: {why}, with another score; remove one of them")
        return found

    @cached_property
    def readable(self) -> list[int]:
        """The documents that have a text; nothing can find the others."""
        return [number for number, one in enumerate(self.documents) if one.text]

    @cached_property
    def _numbers(self) -> tuple[dict[str, int], dict[str, int]]:
        documents = {one.id: number for number, one in enumerate(self.documents)}
        return documents, {one.id: number for number, one in enumerate(self.queries)}

    def _pair(self, one: Judgement | RankedDocument) -> tuple[int, int]:
        """The numbers of the query and the document that a line is about."""
        documents, queries = self._numbers
        if one.query not in queries:
            raise DataError(f"{one.where}: {self.names[1]} has no query {one.query!r}{self.ids}")
        if one.document not in documents:
            raise DataError(f"{one.where}: {self.names[0]} has no document {one.document!r}")
        return queries[one.query], documents[one.document]


def present_in(path: str, texts: Iterable[RetrievalText]) -> list[RetrievalText]:
    """The texts of a file that are not blank; the others are counted."""
    dropped = Dropped()
    there = [*dropped.present(texts)]
    dropped.tell(path)
    return there


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
    return [(query, one, value) for query, ones in values.items() for one, value in ones.items()]


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
        relevant = tuple(sorted(one for one, value in judged.items() if is_relevant(value)))
        positives = [one for one in relevant if one in readable]
        pool = [one for one in _listed(judged, listed.get(query, {})) if one in readable]
        for turn, positive in enumerate(positives):
            found = _in_turn(pool, turn, negatives)
            drawn = _drawn(
                collection, {*relevant, *found}, (query, positive), negatives - len(found)
            )
            yield TrainingGroup(query, positive, (*found, *drawn), relevant)


def _listed(judged: Mapping[int, int], ranked: Mapping[int, float]) -> Iterator[int]:
    """The negatives that are listed for a query, each once."""
    irrelevant = [one for one, value in judged.items() if not is_relevant(value)]
    by_score = [one for one in best_first(ranked, len(ranked)) if one not in judged]
    yield from dict.fromkeys([*sorted(irrelevant), *by_score])


def _in_turn(pool: Sequence[int], turn: int, count: int) -> list[int]:
    size = len(pool)
    return [pool[(turn * count + one) % size] for one in range(min(count, size))]


def _drawn(
    collection: Collection, others: set[int], key: tuple[int, int], count: int
) -> Iterator[int]:
    """`count` documents that are none of the `others`. Raises DataError where there are too few."""
    readable = collection.readable
    if count > len(readable) - len(others.intersection(readable)):
        raise DataError(f"{collection.names[0]}: has too few documents for negatives: {count}")
    attempt, taken = 0, set(others)
    while count:
        number = readable[scalar_key(*key, attempt) % len(readable)]
        attempt += 1
        if number not in taken:
            taken.add(number)
            count -= 1
            yield number
