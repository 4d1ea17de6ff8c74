"""The breakdown of a learner's heads: the mistakes of each, by what its metrics read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_pipeline.tokenization.tokenizer import load
from model import CHOICE, CLASSIFICATION, MULTI_LABEL, TAGGING, Model, ModelConfig, TaskHeadConfig
from trainer.batches import MicroBatch
from trainer.evaluation.held_out import Scores, ValidationSet
from trainer.evaluation.mistakes import (
    Answers,
    Choices,
    Classes,
    Exits,
    LabelSets,
    Numbers,
    Part,
    Tags,
    Texts,
)
from trainer.evaluation.rankings import Groups, Searches
from trainer.learners.programs import score
from trainer.scoring.branch_metric import BranchMetric
from trainer.scoring.metric import Metric
from trainer.scoring.ranking_metric import PairRanking, VectorRanking
from trainer.scoring.scores import Metrics
from trainer.scoring.span_metric import SpanMetric
from trainer.scoring.task_metrics import (
    ClassMetric,
    CosineMetric,
    GroupRanking,
    MultiLabelMetric,
    NumberMetric,
    TagMetric,
)

MOST_LABELS = 200  # of a head; with more there is no breakdown
_PARTS: Mapping[type, type[Part]] = {
    ClassMetric: Classes,
    MultiLabelMetric: LabelSets,
    TagMetric: Tags,
    NumberMetric: Numbers,
    CosineMetric: Numbers,
    SpanMetric: Answers,
    GroupRanking: Groups,
    VectorRanking: Searches,
    PairRanking: Searches,
    BranchMetric: Exits,
}


class Breakdown:
    """Reads the batches and readings of one learner, in the one process that scores it."""

    def __init__(
        self, metrics: Sequence[Metric[Any]], model: ModelConfig, tokenizer_dir: Path
    ) -> None:
        texts = Texts(*load(tokenizer_dir))
        self._parts: dict[int, Part] = {}  # by the number of the metric that a part reads
        for number, metric in enumerate(metrics):
            head = model.task_heads.get(metric.head)
            kind = _part_of(metric, head) if head else None
            if head and kind and not any(type(one) is kind for one in self._of(metric.head)):
                self._parts[number] = kind(metric, head, texts)

    def _of(self, head: str) -> list[Part]:
        return [part for part in self._parts.values() if part.metric.head == head]

    def add(self, batch: MicroBatch, readings: Sequence[Tensor]) -> None:
        """Add a batch, as the learner read it, with the readings of each metric."""
        for number, part in self._parts.items():
            if len(readings[number]):
                part.add(batch, readings[number])

    def finish(self) -> dict[str, Any]:
        """The breakdown of each head, as in ``evaluation.json``; the first metric's part counts."""
        found: dict[str, Any] = {}
        for part in reversed(self._parts.values()):
            if fields := part.finish():
                found[part.metric.head] = found.get(part.metric.head, {}) | fields
        return found


def _part_of(metric: Metric[Any], head: TaskHeadConfig) -> type[Part] | None:
    """The part that reads this metric of a head, if there is one."""
    kind = _PARTS.get(type(metric))
    if kind is Classes and head.kind == CHOICE:
        return Choices
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
    view: str,
    micro_batch: int,
    breakdown: Breakdown | None = None,
) -> Scores:
    """The scores of a model that reads the examples in this view, and its `breakdown` if asked."""

    def of_batch(batch: MicroBatch) -> Sequence[Tensor]:
        readings = score(model, batch.view(view), metrics)
        if breakdown is not None:
            breakdown.add(batch.view(view), readings)
        return readings

    device = next(model.parameters()).device
    return examples.evaluate(of_batch, metrics, micro_batch, device)
