"""Documents ranked for queries: found by their vectors, or re-ranked by scores of pairs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from configs.errors import OptionError
from data_pipeline import DataError, EmptyText
from data_pipeline.task_files.collection import COUNTED, Collection, best_first, present_in
from data_pipeline.task_files.retrieval import read_retrieval_documents
from model import REGRESSION, VECTOR, ModelError
from trainer.prediction.embedding import is_plain_text, queries_in, segments_of
from trainer.prediction.fine_tuned import FineTuned, sorted_together, tell_cut, tell_incomplete
from trainer.scoring.ranking_metric import nearest_documents, with_others
from trainer.tasks.reranking import Reranking
from trainer.tasks.retrieval import Retrieval


def rankings(
    folder: Path,
    queries: str,
    documents: str,
    candidates: str | None,
    count: int,
    device: torch.device,
    head: str | None = None,
    encoding: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield ``{"query": ..., "documents": [{"id": ..., "score": ...}, ...]}`` for each query.

    A dual encoder finds the `count` best among all documents. A cross-encoder puts the first
    `count` of a run of `candidates` in a new order; the others stay below them. `head` names
    the one to use of several, `encoding` that of the texts where it is not that of training.
    Raises ModelError for other models, OptionError for `candidates` that do not fit, DataError for
    what cannot be read.
    """
    tuned = FineTuned.open(folder, device, head, encoding)
    if tuned.head.kind == VECTOR:
        if candidates is not None:
            raise OptionError("--candidates: is for a cross-encoder; remove it for a dual encoder")
        return _found(tuned, queries, documents, count)
    if tuned.head.kind != REGRESSION:
        raise ModelError(f"{folder}: its head is a {tuned.head.kind}, which ranks no documents")
    if candidates is None:
        raise OptionError("--candidates: must name the ranking that the cross-encoder re-ranks")
    return _reranked(tuned, queries, documents, candidates, count)


def _found(tuned: FineTuned, queries: str, documents: str, count: int) -> Iterator[dict[str, Any]]:
    task, encoder = tuned.facts.section(Retrieval), tuned.encoder
    encoding = tuned.facts.encoding
    texts = present_in(documents, read_retrieval_documents(documents, encoding))
    known, outputs = [], []
    for some in sorted_together(texts):
        read = [segments_of(document, task.document_sequence, encoder) for document in some]
        known += [document for document, segments in zip(some, read, strict=True) if segments]
        outputs += tuned.outputs([segments for segments in read if segments])
    if not known:
        raise DataError(f"{documents}: no document has a title or a text")
    vectors = torch.stack(outputs)
    tell_cut(documents, encoder)
    unanswered = 0
    asked_for = queries_in(queries, task.numbered_by_order, encoding)
    for some in sorted_together(asked_for, path=queries):
        asked = [segments_of(query, task.query_sequence, encoder) for query in some]
        unanswered += asked.count([])
        answers = iter(tuned.outputs([segments for segments in asked if segments]))
        none = torch.zeros_like(vectors[0])
        of_queries = torch.stack([next(answers) if segments else none for segments in asked])
        nearest = nearest_documents(of_queries, vectors, count)
        for query, segments, scores, rows in zip(some, asked, *nearest, strict=True):
            ids = (known[row].id for row in rows.tolist() if segments)
            yield _answer(query.id, dict(zip(ids, scores.tolist(), strict=False)))
    tell_incomplete(queries, unanswered, encoder)


def _reranked(
    tuned: FineTuned, queries: str, documents: str, candidates: str, count: int
) -> Iterator[dict[str, Any]]:
    by_order = tuned.facts.section(Reranking).numbered_by_order
    encoding = tuned.facts.encoding
    counted = COUNTED if by_order or is_plain_text(queries, encoding) else ""
    texts = queries_in(queries, by_order, encoding)
    collection = Collection.of(documents, texts, queries, counted, encoding)
    listed = collection.ranking(candidates)
    for number in range(len(collection.queries)):
        ranked = listed.get(number, {})
        scores = _pair_scores(tuned, collection, number, [*best_first(ranked, count)])
        all_scores = with_others(scores, ranked) if scores else ranked
        ids = {collection.documents[document].id: score for document, score in all_scores.items()}
        yield _answer(collection.queries[number].id, ids)
    blank = sum(not query.text.strip() for query in collection.queries)
    tell_cut(documents, tuned.encoder)
    tell_incomplete(queries, blank, tuned.encoder)


def _pair_scores(
    tuned: FineTuned, collection: Collection, query: int, documents: Sequence[int]
) -> dict[int, float]:
    """The scores of these documents; none of a pair in which a text has no token."""
    asked, pairs = collection.queries[query].text, {}
    for document in documents:
        text = collection.documents[document]
        with suppress(EmptyText):
            pairs[document] = tuned.encoder.sequence([asked, text.text], text.where)
    outputs = tuned.outputs([*pairs.values()])
    return {document: score.item() for document, score in zip(pairs, outputs, strict=True)}


def _answer(query: str, scores: Mapping[str, float]) -> dict[str, Any]:
    ordered = sorted(scores.items(), key=lambda item: -item[1])
    return {
        "query": query or None,
        "documents": [{"id": document, "score": score} for document, score in ordered],
    }
