"""The breakdown of a learner's heads: the mistakes of each, by what its metrics read.

The mistakes of a head that ranks are the queries whose right answer stands low.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline import NO_LABEL
from data_pipeline.tokenization.tokenizer import load
from model import (
    CHOICE,
    CLASSIFICATION,
    MULTI_LABEL,
    TAGGING,
    Capture,
    Model,
    ModelConfig,
    TaskHeadConfig,
)
from trainer.batches import MicroBatch
from trainer.evaluation import mistakes
from trainer.evaluation.held_out import Scores, ValidationSet
from trainer.learners.module import compared_heads, features_of, score
from trainer.scoring import task_metrics
from trainer.scoring.metric import GatheredMetric, Metric
from trainer.scoring.ranking_metric import PairRanking, RankingMetric, VectorRanking
from trainer.scoring.scores import Metrics, TeacherHeads
from trainer.scoring.span_metric import SpanMetric

TOKENS = 100  # of a query or document that are kept to be shown
LOWEST = "those whose best right answer stands lowest"
Ranked = tuple[int, Sequence[int], set[int]]  # a query, its documents in order, the right ones


class Rankings(mistakes.Part):
    """The part of a head that ranks documents for queries; both are numbers."""

    order = LOWEST
    metric: GatheredMetric[Any]

    def __init__(
        self, metric: GatheredMetric[Any], head: TaskHeadConfig, texts: mistakes.Texts
    ) -> None:
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
        """Yield each row of a batch, with the numbers of its query and its document."""

    @abstractmethod
    def rankings(self, readings: Tensor) -> Iterator[Ranked]:
        """The ranking of every query."""

    def finish(self) -> dict[str, Any]:
        if not self._queries:
            return {}
        for query, ordered, right in self.rankings(torch.cat(self._rows).cpu()):
            place = next(
                (n for n, document in enumerate(ordered, start=1) if document in right), None
            )
            if place != 1 and right and self.wrong.takes(place or math.inf):
                best = self._told(ordered[place - 1] if place else min(right), self._documents)
                answer = f"{place}. {best}" if place else f"not found: {best}"
                first = self._told(ordered[0], self._documents) if ordered else mistakes.NOTHING
                self.wrong.keep(self._told(query, self._queries), answer, first)
        return super().finish()

    def _told(self, number: int, among: Mapping[int, NDArray[np.int32]]) -> str:
        """The text of a query or document; empty for one that has not been read."""
        ids = among[number].tolist() if number in among else []
        return mistakes.shortened(self.texts.of([ids])[0])


class Searches(Rankings):
    """The part of a head that finds, or puts in order, the documents of a collection."""

    metric: RankingMetric

    def numbers(self, batch: MicroBatch) -> Iterator[tuple[int, int, int]]:
        names = RankingMetric.query(self.metric.head), RankingMetric.document(self.metric.head)
        queries, documents = (batch.row_labels(name).tolist() for name in names)
        yield from zip(range(len(queries)), queries, documents, strict=True)

    def rankings(self, readings: Tensor) -> Iterator[Ranked]:
        ranking, judged = self.metric.judged(readings)
        for query, scores in ranking.items():
            ordered = sorted(
                scores, key=lambda document: (scores[document], str(document)), reverse=True
            )
            yield (
                query,
                ordered,
                {document for document, value in judged[query].items() if value > 0},
            )


class Groups(Rankings):
    """The part of a head that ranks the second texts of pairs which share their first."""

    metric: task_metrics.GroupRanking

    def __init__(self, *made_of: Any) -> None:
        super().__init__(*made_of)
        self._pairs = 0  # read so far

    def numbers(self, batch: MicroBatch) -> Iterator[tuple[int, int, int]]:
        groups = batch.row_labels(task_metrics.GroupRanking.group(self.metric.head)).tolist()
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


MOST_LABELS = 200  # of a head; with more there is no breakdown
_PARTS: Mapping[type, type[mistakes.Part]] = {
    task_metrics.ClassMetric: mistakes.Classes,
    task_metrics.MultiLabelMetric: mistakes.LabelSets,
    task_metrics.TagMetric: mistakes.Tags,
    task_metrics.NumberMetric: mistakes.Numbers,
    task_metrics.CosineMetric: mistakes.Numbers,
    SpanMetric: mistakes.Answers,
    task_metrics.GroupRanking: Groups,
    VectorRanking: Searches,
    PairRanking: Searches,
    task_metrics.BranchMetric: mistakes.Exits,
}


class Breakdown:
    """Reads the batches and readings of one learner, in the one process that scores it."""

    def __init__(
        self, metrics: Sequence[Metric[Any]], model: ModelConfig, tokenizer_dir: Path
    ) -> None:
        texts = mistakes.Texts(*load(tokenizer_dir))
        self._parts: dict[int, mistakes.Part] = {}  # by the number of the metric that a part reads
        for number, metric in enumerate(metrics):
            head = model.task_heads.get(metric.head)
            kind = _part_of(metric, head) if head else None
            if head and kind and not any(type(part) is kind for part in self._of(metric.head)):
                self._parts[number] = kind(metric, head, texts)

    def _of(self, head: str) -> list[mistakes.Part]:
        return [part for part in self._parts.values() if part.metric.head == head]

    def add(self, batch: MicroBatch, readings: Sequence[Tensor]) -> None:
        """Add a batch, as the learner read it, with the readings of each metric."""
        for number, part in self._parts.items():
            if len(readings[number]):
                part.add(batch, readings[number])

    def finish(self) -> dict[str, Any]:
        """The breakdown of each head, as in ``evaluation.json``; the first metric's part counts."""
        breakdown: dict[str, Any] = {}
        for part in reversed(self._parts.values()):
            if fields := part.finish():
                breakdown[part.metric.head] = breakdown.get(part.metric.head, {}) | fields
        return breakdown


def _part_of(metric: Metric[Any], head: TaskHeadConfig) -> type[mistakes.Part] | None:
    """The part that reads this metric of a head, if there is one."""
    kind = _PARTS.get(type(metric))
    if kind is mistakes.Classes and head.kind == CHOICE:
        return mistakes.Choices
    if (
        head.kind in (CLASSIFICATION, MULTI_LABEL, TAGGING)
        and not 1 < len(head.labels) <= MOST_LABELS
    ):
        return None
    return kind


@torch.inference_mode()
def score_examples(
    model: Model,
    examples: ValidationSet,
    metrics: Metrics,
    read: Callable[[MicroBatch], MicroBatch],
    breakdown: Breakdown | None,
    teacher_of: Callable[[str], Model] | None = None,
) -> Scores:
    """The scores of a model, and its `breakdown` if asked; `read` is what it reads of a batch.

    `teacher_of` gives the model of a learner with which metrics compare, in the default view.
    """

    def of_batch(batch: MicroBatch) -> Sequence[Tensor]:
        teachers: TeacherHeads = {}
        if teacher_of is not None:
            teachers = {
                name: features_of(teacher_of(name), batch, Capture(heads=heads)).heads
                for name, heads in compared_heads(metrics, batch).items()
            }
        view = read(batch)
        readings = score(model, view, metrics, teachers)
        if breakdown is not None:
            breakdown.add(view, readings)
        return readings

    device = next(model.parameters()).device
    return examples.evaluate(of_batch, metrics, device)
