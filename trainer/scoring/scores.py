"""The scores of a model's heads on held-out examples, and which metric each head has.

Logits over the vocabulary are computed a chunk at a time. The scores of several tasks have a mean,
as GLUE has it (arXiv 1804.07461, section 3): of their primary scores, whatever their sizes.
"""

import dataclasses
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline import MASKED, NO_LABEL, PAIRS
from model import (
    CLASSIFICATION,
    DETECTION,
    Capture,
    Features,
    Model,
    ModelConfig,
    vocabulary_logits,
)
from trainer.batches import MicroBatch
from trainer.scoring.columns import ACCURACY, LOSS, NUMBER, PAIR_ACCURACY, TASK_MEAN, Column
from trainer.scoring.metric import Metric, SummedMetric
from trainer.teacher_outputs import OutputProjection

# Positions whose logits are alive together: 1024 x 50k x 4 bytes is 200 MB.
CHUNK = 1024
UNIGRAM = LOSS.name, ACCURACY.name  # the scores of the unigram baseline
OVER_UNIGRAM = "_over_unigram"  # suffix of a column: the score minus the baseline's


TeacherHeads = Mapping[str, Mapping[str, Tensor]]  # learner -> head -> its output
NO_TEACHERS: TeacherHeads = MappingProxyType({})


@dataclass(frozen=True)
class ScoreInputs:
    """The input of a metric from one micro-batch, and the `model` that has read it.

    projection: the model's own, if it has one; teachers: the outputs for the same micro-batch of
    those heads that a metric `compares` with.
    """

    features: Features
    projection: OutputProjection | None
    batch: MicroBatch
    model: Model
    teachers: TeacherHeads = field(default_factory=dict)


class MaskedTokens(SummedMetric[ScoreInputs]):
    """Cross-entropy (nats) and top-1 accuracy at masked positions."""

    head = MASKED
    columns = LOSS, ACCURACY
    size = 3

    @property
    def primary(self) -> Column:
        return ACCURACY

    @torch.no_grad()
    def of_batch(self, outputs: ScoreInputs) -> Tensor:
        """Summed loss, number of right predictions, labelled positions: float32 [3]."""
        inputs = outputs.features.vocabulary_input
        assert inputs is not None
        if MASKED not in outputs.batch.targets:  # labelled examples
            return inputs.new_zeros(self.size, dtype=torch.float32)
        target = outputs.batch.targets[MASKED].labels
        assert outputs.projection is not None
        loss = inputs.new_zeros((), dtype=torch.float32)
        right = loss.clone()
        chunks = _logits(inputs, outputs.projection)
        for logits, labels in zip(chunks, target.split(CHUNK), strict=True):
            loss += F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")
            right += (logits.argmax(dim=-1) == labels).sum()
        return torch.stack([loss, right, (target != NO_LABEL).sum()])

    def finish(self, total: Tensor) -> dict[str, float]:
        loss, right, masked = total.tolist()
        return {LOSS.name: loss / masked, ACCURACY.name: right / masked} if masked else {}


class HeadAccuracy(SummedMetric[ScoreInputs]):
    """The accuracy of a head that classifies examples."""

    size = 2

    def __init__(self, head: str, column: Column) -> None:
        self.head, self.columns = head, (column,)

    @torch.no_grad()
    def of_batch(self, outputs: ScoreInputs) -> Tensor:
        """Right predictions and labelled examples: int64 [2]. The target has the head's name."""
        labels = outputs.batch.row_labels(self.head)
        right = (outputs.features.heads[self.head].argmax(dim=-1) == labels).sum()
        return torch.stack([right, (labels != NO_LABEL).sum()])

    def finish(self, total: Tensor) -> dict[str, float]:
        right, examples = total.tolist()
        return {self.columns[0].name: right / examples} if examples else {}


class ReplacedTokens(SummedMetric[ScoreInputs]):
    """The detection of replaced tokens: F1, precision and recall of the replaced, and their loss.

    A generator that gets better makes them harder to detect.
    """

    size = 6

    def __init__(self, head: str) -> None:
        self.head = head
        names = ("F1", "accuracy", "precision", "recall")
        self.columns = (
            *(Column(f"{head}_{name.lower()}", f"{head} {name}") for name in names),
            Column(f"{head}_loss", f"{head} loss", NUMBER, higher_is_better=False),
        )

    @torch.no_grad()
    def of_batch(self, outputs: ScoreInputs) -> Tensor:
        """Summed loss, tokens, right ones, replaced, detected, rightly detected: float64 [6]."""
        labels = outputs.batch.targets[self.head].labels
        is_token, is_replaced = labels != NO_LABEL, labels == 1
        logits = outputs.features.heads[self.head].flatten().double()
        is_detected = is_token & (logits > 0)
        loss = F.binary_cross_entropy_with_logits(
            logits, is_replaced.double(), is_token.double(), reduction="sum"
        )
        right = is_token & (is_detected == is_replaced)
        both = is_detected & is_replaced
        counts = [part.sum() for part in (is_token, right, is_replaced, is_detected, both)]
        return torch.stack([loss, *counts])

    def finish(self, total: Tensor) -> dict[str, float]:
        loss, tokens, right, replaced, detected, both = total.tolist()
        parts = {
            "f1": (2 * both, replaced + detected),
            "accuracy": (right, tokens),
            "precision": (both, detected),
            "recall": (both, replaced),
            "loss": (loss, tokens),
        }
        return {f"{self.head}_{name}": part / of for name, (part, of) in parts.items() if of}


Metrics = tuple[Metric[ScoreInputs], ...]
_OF_TEXT = (MaskedTokens(), HeadAccuracy(PAIRS, PAIR_ACCURACY))


def metrics_of(
    model: ModelConfig, of_tasks: Mapping[str, Metrics] = MappingProxyType({})
) -> Metrics:
    """The metrics of a model's heads; `of_tasks` maps the heads of tasks to their metrics.

    A classifier that is no task's has its accuracy, in the column ``HEAD_accuracy``.
    """
    heads = [*([MASKED] if model.mlm_head else []), *([PAIRS] if model.pair_head else [])]
    of_heads: dict[str, Metrics] = {}
    for name, head in model.task_heads.items():
        if head.kind == CLASSIFICATION:
            of_heads[name] = (HeadAccuracy(name, Column(f"{name}_accuracy", name)),)
        elif head.kind == DETECTION:
            of_heads[name] = (ReplacedTokens(name),)
    known = {**of_heads, **{metric.head: (metric,) for metric in _OF_TEXT}, **of_tasks}
    return tuple(metric for head in [*heads, *model.task_heads] for metric in known.get(head, ()))


def columns_of(metrics: Collection[Metric[Any]], tasks: Collection[str] = ()) -> dict[str, Column]:
    """The scores that these metrics report, by name; the mean of `tasks` first, if they have one.

    Of several tasks, a heading begins with the head's name, as in "sst2 accuracy".
    """
    mean = {TASK_MEAN.name: TASK_MEAN} if _primary_columns(metrics, tasks) else {}
    listed = [(metric.head, column) for metric in metrics for column in metric.columns]
    of_tasks = {head for head, column in listed if column.name.startswith(f"{head}_")}
    return mean | {
        column.name: dataclasses.replace(column, heading=f"{head} {column.heading}")
        if len(of_tasks) > 1 and head in of_tasks and column.heading != head
        else column
        for head, column in listed
    }


def capture_for(metrics: Iterable[Metric[Any]]) -> Capture:
    """The features of a model, besides its predictions, that the metrics read."""
    read = [*metrics]
    heads = {metric.head for metric in read}
    branches = sorted(metric.head for metric in read if metric.reads_branches)
    return Capture(
        last_hidden_state=PAIRS in heads,
        heads=tuple(sorted(heads - {MASKED, PAIRS})),
        branches=tuple(branches),
    )


def shown(
    scores: Mapping[str, float | None], metrics: Iterable[Metric[Any]], trained: Iterable[str]
) -> dict[str, float | None]:
    """The scores by name; None for a score whose head is not in `trained`."""
    heads = set(trained)
    return {
        column.name: scores[column.name] if metric.head in heads else None
        for metric in metrics
        for column in metric.columns
        if column.name in scores
    }


def with_leads(scores: Mapping[str, float], unigram: Mapping[str, float]) -> dict[str, float]:
    """The scores, and how far each is above the unigram baseline's."""
    leads = {
        f"{name}{OVER_UNIGRAM}": scores[name] - unigram[name] for name in unigram if name in scores
    }
    return {**scores, **leads}


@torch.no_grad()
def predictions(vocabulary_input: Tensor, projection: OutputProjection) -> Tensor:
    """The most probable token at each position, [P] int64. vocabulary_input: [P, E]."""
    return torch.cat([logits.argmax(dim=-1) for logits in _logits(vocabulary_input, projection)])


def _logits(vocabulary_input: Tensor, projection: OutputProjection) -> Iterator[Tensor]:
    """Float32 logits [chunk, V] of successive positions."""
    for inputs in vocabulary_input.split(CHUNK):
        yield vocabulary_logits(inputs, projection.weight, projection.bias).float()


def task_mean(
    scores: Mapping[str, float | None], metrics: Iterable[Metric[Any]], tasks: Collection[str]
) -> dict[str, float | None]:
    """The mean over these heads, by the name of its column; None where one is untrained.

    Empty where there is none, or a score is undefined.
    """
    names = [column.name for column in _primary_columns(metrics, tasks)]
    if not names or not all(name in scores for name in names):
        return {}
    known = [score for score in (scores[name] for name in names) if score is not None]
    return {TASK_MEAN.name: statistics.fmean(known) if len(known) == len(names) else None}


def _primary_columns(metrics: Iterable[Metric[Any]], tasks: Collection[str]) -> list[Column]:
    """The primary score of each of several heads; none if lower is better for one of them."""
    first: dict[str, Column] = {}
    for metric in metrics:
        first.setdefault(metric.head, metric.primary)
    columns = [first[task] for task in tasks if task in first]
    have_mean = len(columns) == len(tasks) > 1 and all(
        column.higher_is_better for column in columns
    )
    return columns if have_mean else []
