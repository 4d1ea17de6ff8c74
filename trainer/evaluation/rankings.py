"""The mistakes of heads that rank: the queries whose right answer stands low."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline import NO_LABEL
from model import TaskHeadConfig
from trainer.batches import MicroBatch
from trainer.evaluation.mistakes import NOTHING, Part, Texts, shortened
from trainer.scoring.metric import GatheredMetric
from trainer.scoring.ranking_metric import RankingMetric
from trainer.scoring.task_metrics import GroupRanking

TOKENS = 100  # of a query or document that are kept to be shown
LOWEST = "those whose best right answer stands lowest"
Ranked = tuple[int, Sequence[int], set[int]]  # a query, its documents in order, the right ones


class Rankings(Part):
    """The part of a head that ranks documents for queries; both are numbers."""

    order = LOWEST
    metric: GatheredMetric[Any]

    def __init__(self, metric: GatheredMetric[Any], head: TaskHeadConfig, texts: Texts) -> None:
        super().__init__(metric, head, texts)
        self._rows: list[Tensor] = []
        self._queries: dict[int, NDArray[np.int32]] = {}  # the first `TOKENS` ids of each
        self._documents: dict[int, NDArray[np.int32]] = {}

    def add(self, batch: MicroBatch, readings: Tensor) -> None:
        """`readings` as the metric gives them."""
        self._rows.append(readings)
        for row, query, document in self.numbers(batch):
            pieces = self.texts.pieces(batch, row)
            if query != NO_LABEL and pieces:
                self._queries.setdefault(query, np.array(pieces[0][:TOKENS], np.int32))
            if document != NO_LABEL and pieces:
                self._documents.setdefault(document, np.array(pieces[-1][:TOKENS], np.int32))

    @abstractmethod
    def numbers(self, batch: MicroBatch) -> Iterator[tuple[int, int, int]]:
        """Each row of a batch with the numbers of its query and its document."""

    @abstractmethod
    def rankings(self, readings: Tensor) -> Iterator[Ranked]:
        """The ranking of every query."""

    def finish(self) -> dict[str, Any]:
        if not self._queries:
            return {}
        for query, ordered, right in self.rankings(torch.cat(self._rows).cpu()):
            place = next((n for n, one in enumerate(ordered, start=1) if one in right), None)
            if place != 1 and right and self.wrong.takes(place or math.inf):
                best = self._told(ordered[place - 1] if place else min(right), self._documents)
                answer = f"{place}. {best}" if place else f"not found: {best}"
                first = self._told(ordered[0], self._documents) if ordered else NOTHING
                self.wrong.keep(self._told(query, self._queries), answer, first)
        return super().finish()

    def _told(self, number: int, among: Mapping[int, NDArray[np.int32]]) -> str:
        """The text of a query or document; empty for one that has not been read."""
        ids = among[number].tolist() if number in among else []
        return shortened(self.texts.of([ids])[0])


class Searches(Rankings):
    """The part of a head that finds, or puts in order, the documents of a collection."""

    metric: RankingMetric

    def numbers(self, batch: MicroBatch) -> Iterator[tuple[int, int, int]]:
        names = RankingMetric.query(self.metric.head), RankingMetric.document(self.metric.head)
        queries, documents = (batch.row_labels(name).tolist() for name in names)
        yield from zip(range(len(queries)), queries, documents, strict=True)

    def rankings(self, readings: Tensor) -> Iterator[Ranked]:
        ranking, judged = self.metric.judged(readings)
        for query, found in ranking.items():
            ordered = sorted(found, key=lambda one: (found[one], str(one)), reverse=True)
            yield query, ordered, {one for one, value in judged[query].items() if value > 0}


class Groups(Rankings):
    """The part of a head that ranks the second texts of pairs which share their first."""

    metric: GroupRanking

    def __init__(self, *made_of: Any) -> None:
        super().__init__(*made_of)
        self._pairs = 0  # read so far

    def numbers(self, batch: MicroBatch) -> Iterator[tuple[int, int, int]]:
        groups = batch.row_labels(GroupRanking.group(self.metric.head)).tolist()
        for row in self.labelled(batch):
            yield row, groups[row], self._pairs
            self._pairs += 1

    def rankings(self, readings: Tensor) -> Iterator[Ranked]:
        groups: dict[int, list[tuple[float, int, int]]] = {}
        for number, (margin, label, group) in enumerate(readings.tolist()):
            groups.setdefault(int(group), []).append((-margin, int(label), number))
        for group, pairs in groups.items():
            right = {number for _, label, number in pairs if label}
            yield group, [number for *_, number in sorted(pairs)], right
