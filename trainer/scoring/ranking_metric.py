"""How well documents are ranked for queries: by exact search of vectors, or by scores of pairs."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from data_pipeline import NO_LABEL
from data_pipeline.task_files.collection import Ranking, Relevance, best_first, by_query
from trainer.scoring.columns import Column
from trainer.scoring.metric import GatheredMetric
from trainer.scoring.scores import ScoreInputs
from trainer.scoring.task_scores import TREC_NAMES, ranking_scores, require_packages

RANKING_SCORES = tuple(TREC_NAMES)
USUAL = ["ndcg_10", "mrr_10", "recall_100", "map"]
DEPTH = 1000  # documents that are ranked for a query, as in TREC's runs
Value = TypeVar("Value")


class RankingMetric(GatheredMetric[ScoreInputs]):
    """Scores of rankings over the `scored` queries that are judged, as ``trec_eval -c`` has them.

    A query without a text is not read, has no ranking, and counts as 0. Raises TrainingError where
    a package that a score needs is not installed.
    """

    dtype: ClassVar[torch.dtype] = torch.float32  # exact up to document 16,777,216

    def __init__(self, head: str, names: Sequence[str], references: Callable[[], Any]) -> None:
        """`references` gives those of `CollectionTask`."""
        require_packages(names)
        self.head, self.names, self.references = head, tuple(names), references
        self.columns = tuple(Column(f"{head}_{name}", name) for name in names)

    @staticmethod
    def query(head: str) -> str:
        """The target that holds the number of a query; -100: the text is none."""
        return f"{head}_query"

    @staticmethod
    def document(head: str) -> str:
        """The target that holds the number of a document; -100: the text is none."""
        return f"{head}_document"

    @torch.no_grad()
    def of_batch(self, outputs: ScoreInputs) -> Tensor:
        """[rows, 2 + outputs]: the numbers of query and document, and what the head says of it."""
        batch = outputs.batch
        if self.query(self.head) not in batch.targets:
            return self.empty(batch.input_ids.device)
        query, document = (
            batch.row_labels(name(self.head)).float() for name in (self.query, self.document)
        )
        said = outputs.features.heads[self.head].float()
        rows = torch.cat([query[:, None], document[:, None], said], dim=1)
        return rows[(query != NO_LABEL) | (document != NO_LABEL)]

    def finish(self, total: Tensor) -> dict[str, float]:
        if not len(total):
            return {}
        ranking, judged = self.judged(total.cpu())
        scores = ranking_scores(_by_name(ranking), _by_name(judged), self.names)
        return {f"{self.head}_{name}": score for name, score in scores.items()}

    def judged(self, rows: Tensor) -> tuple[Ranking, Relevance]:
        """The ranking of each query that has been read, and the judgements of all that count."""
        ranking = self.ranking(rows)
        relevance, without_text = by_query(self._read["relevance"]), self._read["without_text"]
        return ranking, {query: relevance[query] for query in (*ranking, *without_text)}

    @abstractmethod
    def ranking(self, rows: Tensor) -> Ranking:
        """The ranking of each query that has been read, by the rows [N, 2 + outputs]."""

    @cached_property
    def _read(self) -> Any:
        return self.references()


class VectorRanking(RankingMetric):
    """Ranks by vectors of queries and documents: exact search by their dot products."""

    def ranking(self, rows: Tensor) -> Ranking:
        numbers, vectors = rows[:, :2].long(), rows[:, 2:]
        queries, documents = (self._in_order(numbers[:, column]) for column in (0, 1))
        scores, places = nearest_documents(vectors[queries], vectors[documents], DEPTH)
        nearest = numbers[documents, 1][places]
        return {
            query: dict(zip(ranked, score, strict=True))
            for query, ranked, score in zip(
                numbers[queries, 0].tolist(), nearest.tolist(), scores.tolist(), strict=True
            )
        }

    @staticmethod
    def _in_order(numbers: Tensor) -> Tensor:
        """The rows that have a number, in its order, on any number of ranks."""
        numbered = (numbers != NO_LABEL).nonzero()[:, 0]
        return numbered[numbers[numbered].argsort()]


class PairRanking(RankingMetric):
    """Ranks by scores of pairs: a query's candidates in their order, before those not read."""

    def ranking(self, rows: Tensor) -> Ranking:
        scores: dict[int, dict[int, float]] = {}
        for query, document, score in rows.tolist():
            scores.setdefault(int(query), {})[int(document)] = score
        return {query: with_others(ones, self._candidates[query]) for query, ones in scores.items()}

    @cached_property
    def _candidates(self) -> Ranking:
        return by_query(self._read["candidates"])


def with_others(read: Mapping[int, float], candidates: Mapping[int, float]) -> dict[int, float]:
    """The documents that were `read`, and below them the other candidates in their own order."""
    lowest = min(read.values())
    others = best_first(
        {document: s for document, s in candidates.items() if document not in read}, DEPTH
    )
    return {**read, **{document: lowest - place for place, document in enumerate(others, start=1)}}


def _by_name(values: Mapping[int, Mapping[int, Value]]) -> dict[str, dict[str, Value]]:
    """Numbers of queries and documents as the names that ``trec_eval`` wants."""
    return {str(query): {str(d): v for d, v in ones.items()} for query, ones in values.items()}


QUERIES, DOCUMENTS = 1 << 8, 1 << 16  # of a block: 64 MiB of scores


def nearest_documents(queries: Tensor, documents: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best `count` documents, or all, of each query: their scores and rows, the best first.

    queries: [Q, D]; documents: [N, D]; both results: [Q, min(count, N)]. Every query is compared
    with every document.
    """
    nearest = [_of_queries(block, documents, count) for block in queries.split(QUERIES)]
    scores, rows = zip(*nearest, strict=True)
    return torch.cat(scores), torch.cat(rows)


def _of_queries(queries: Tensor, documents: Tensor, count: int) -> tuple[Tensor, Tensor]:
    best = queries.new_zeros(len(queries), 0)
    rows = best.long()
    for first in range(0, len(documents), DOCUMENTS):
        scores = queries @ documents[first : first + DOCUMENTS].t()
        numbers = torch.arange(first, first + scores.shape[1], device=rows.device)
        scores = torch.cat([best, scores], dim=1)
        rows = torch.cat([rows, numbers.expand(len(queries), -1)], dim=1)
        best, places = scores.topk(min(count, scores.shape[1]), dim=1)
        rows = rows.gather(1, places)
    return best, rows
