"""How well documents are ranked for queries: by their vectors, or by scores of pairs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from data_pipeline import NO_LABEL
from data_pipeline.task_files.collection import Ranking, Relevance, best_first, by_query
from trainer.scoring.column import Column
from trainer.scoring.exact_search import nearest_documents
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

    def empty(self, device: torch.device) -> Tensor:
        return torch.zeros(0, device=device)  # of no width, which `torch.cat` leaves out

    @torch.no_grad()
    def of_batch(self, outputs: ScoreInputs) -> Tensor:
        """[rows, 2 + outputs]: the numbers of query and document, and what the head says of it.

        Float32, which is exact up to document 16,777,216.
        """
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
        found = ranking_scores(_by_name(ranking), _by_name(judged), self.names)
        return {f"{self.head}_{name}": score for name, score in found.items()}

    def judged(self, rows: Tensor) -> tuple[Ranking, Relevance]:
        """The ranking of each query that has been read, and the judgements of all that count."""
        ranking = self.ranking(rows)
        relevance, without_text = by_query(self._read["relevance"]), self._read["without_text"]
        return ranking, {query: relevance[query] for query in (*ranking, *without_text)}

    @abstractmethod
    def ranking(self, rows: Tensor) -> Ranking:
        """What the rows [N, 2 + outputs] find for each query that has been read."""

    @cached_property
    def _read(self) -> Any:
        return self.references()


class VectorRanking(RankingMetric):
    """Ranks by vectors of queries and documents: exact search by their dot products."""

    def ranking(self, rows: Tensor) -> Ranking:
        numbers, vectors = rows[:, :2].long(), rows[:, 2:]
        queries, documents = (self._in_order(numbers[:, one]) for one in (0, 1))
        scores, places = nearest_documents(vectors[queries], vectors[documents], DEPTH)
        found = numbers[documents, 1][places]
        return {
            query: dict(zip(own, score, strict=True))
            for query, own, score in zip(
                numbers[queries, 0].tolist(), found.tolist(), scores.tolist(), strict=True
            )
        }

    @staticmethod
    def _in_order(numbers: Tensor) -> Tensor:
        """The rows that have a number, in its order, on any number of ranks."""
        there = (numbers != NO_LABEL).nonzero()[:, 0]
        return there[numbers[there].argsort()]


class PairRanking(RankingMetric):
    """Ranks by scores of pairs: a query's candidates in their order, before those not read."""

    def ranking(self, rows: Tensor) -> Ranking:
        found: dict[int, dict[int, float]] = {}
        for query, document, score in rows.tolist():
            found.setdefault(int(query), {})[int(document)] = score
        return {query: with_others(ones, self._candidates[query]) for query, ones in found.items()}

    @cached_property
    def _candidates(self) -> Ranking:
        return by_query(self._read["candidates"])


def with_others(read: Mapping[int, float], candidates: Mapping[int, float]) -> dict[int, float]:
    """The documents that were `read`, and below them the other candidates in their own order."""
    lowest = min(read.values())
    others = best_first({one: s for one, s in candidates.items() if one not in read}, DEPTH)
    return {**read, **{one: lowest - place for place, one in enumerate(others, start=1)}}


def _by_name(values: Mapping[int, Mapping[int, Value]]) -> dict[str, dict[str, Value]]:
    """Numbers of queries and documents as the names that ``trec_eval`` wants."""
    return {str(query): {str(d): v for d, v in ones.items()} for query, ones in values.items()}
