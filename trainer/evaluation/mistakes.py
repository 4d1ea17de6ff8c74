"""The mistakes of one head of a learner: its scores by class, and some of its wrong examples.

A part of a breakdown reads the batches that the head was scored on beside a metric's readings of
them. What it gives does not grow with the examples.
"""

import heapq
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline import NO_LABEL, Vocabulary
from model import TaskHeadConfig
from trainer.batches import MicroBatch
from trainer.scoring.metric import Metric
from trainer.scoring.span_metric import SpanMetric
from trainer.scoring.task_metrics import END, TagMetric
from trainer.scoring.task_scores import answer_scores, scores_by_type

WRONG = 20  # examples that are kept
MOST_POINTS = 400  # of a scatter plot
LONGEST = 300  # characters of a passage or document that are shown
AT_RANDOM, LARGEST = "drawn at random", "those with the largest errors"
NOTHING = "(none)"
SPEEDS = (0.1, 0.3, 0.5, 0.8)  # of leaving early

Wrong = dict[str, str]  # text, label and predicted
Pieces = list[list[int]]  # the ids of each text of an example


class Texts:
    """The texts of examples, from what a model has read of them."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
        self._tokenizer, self._ends = tokenizer, {vocabulary.cls, vocabulary.sep}

    def pieces(self, batch: MicroBatch, row: int) -> Pieces:
        """The ids of the texts of a row, without special tokens."""
        parts: Pieces = [[]]
        for token in batch.input_ids[row][batch.attention_mask[row]].tolist():
            if token not in self._ends:
                parts[-1].append(token)
            elif parts[-1]:
                parts.append([])
        return [part for part in parts if part]

    def of(self, pieces: Pieces) -> list[str]:
        """The texts with these ids."""
        return [self._tokenizer.decode(ids).strip() for ids in pieces]

    def example(self, batch: MicroBatch, number: int) -> str:
        """The texts of an example, which may have several sequences."""
        first = number * batch.sequences
        rows = range(first, first + batch.sequences)
        return " | ".join(text for row in rows for text in self.of(self.pieces(batch, row)))

    def words(self, batch: MicroBatch, row: int, starts: Tensor) -> list[str]:
        """The words that begin at these columns; the last one ends before [SEP]."""
        ids, mask = batch.input_ids[row], batch.attention_mask[row]
        ends = torch.cat([starts[1:], mask.sum()[None] - 1])
        spans = zip(starts.tolist(), ends.tolist(), strict=True)
        return self.of([ids[start:end].tolist() for start, end in spans])


class WrongExamples:
    """The `WRONG` examples with the largest weights; without weights, drawn at random."""

    def __init__(self, order: str) -> None:
        self.order, self.count = order, 0
        self._random, self._kept = random.Random(0), list[tuple[float, int, Wrong]]()
        self._weight = 0.0  # of the newest

    def takes(self, weight: float | None = None) -> bool:
        """Count an example; whether it is to be kept (`keep`)."""
        self.count += 1
        self._weight = self._random.random() if weight is None else weight
        return len(self._kept) < WRONG or self._weight > self._kept[0][0]

    def keep(self, text: str, label: str, predicted: str) -> None:
        """Keep the example that was just taken, in place of that with the lowest weight."""
        example = {"text": text, "label": label, "predicted": predicted}
        put = heapq.heappush if len(self._kept) < WRONG else heapq.heapreplace
        put(self._kept, (self._weight, -self.count, example))

    def finish(self) -> dict[str, Any]:
        """The part of ``evaluation.json`` about wrong examples, the largest weight first."""
        kept = [
            example
            for _, _, example in sorted(self._kept, key=lambda entry: (-entry[0], -entry[1]))
        ]
        return {"wrong": kept, "wrong_examples": self.count, "order": self.order}


class Part(ABC):
    """A part of the breakdown of a head, made of the readings of one of its metrics."""

    order = AT_RANDOM

    def __init__(self, metric: Metric[Any], head: TaskHeadConfig, texts: Texts) -> None:
        self.metric, self.labels, self.texts = metric, list(head.labels), texts
        self.wrong = WrongExamples(self.order)

    @abstractmethod
    def add(self, batch: MicroBatch, readings: Tensor) -> None:
        """Add a batch, as the learner has read it, and the metric's readings of it."""

    def finish(self) -> dict[str, Any]:
        """Fields of the head's breakdown in ``evaluation.json``; none without examples."""
        return self.wrong.finish()

    def labelled(self, batch: MicroBatch) -> list[int]:
        """The numbers of the examples of a batch that have a label."""
        labels = batch.row_labels(self.metric.head)
        known = ~labels.isnan() if labels.is_floating_point() else labels != NO_LABEL
        return known.view(len(labels), -1).all(dim=1).nonzero()[:, 0].tolist()


class Classes(Part):
    """The part of a head that gives each text one of its labels."""

    def __init__(self, metric: Metric[Any], head: TaskHeadConfig, texts: Texts) -> None:
        super().__init__(metric, head, texts)
        self.confusion = np.zeros((len(self.labels), len(self.labels)), np.int64)

    def add(self, batch: MicroBatch, readings: Tensor) -> None:
        """`readings` [examples, 2]: the predicted class and the right one."""
        pairs = _numbers(readings)
        np.add.at(self.confusion, (pairs[:, 1], pairs[:, 0]), 1)
        for number, (predicted, label) in zip(self.labelled(batch), pairs.tolist(), strict=True):
            if predicted != label and self.wrong.takes():
                names = self.labels[label], self.labels[predicted]
                self.wrong.keep(self.texts.example(batch, number), *names)

    def finish(self) -> dict[str, Any]:
        if not self.confusion.any():
            return {}
        of_classes = {"labels": self.labels, "confusion": self.confusion.tolist()}
        return {**of_classes, "by_class": self.by_class(), **super().finish()}

    def by_class(self) -> dict[str, dict[str, float]]:
        """Precision, recall, F1 and number of each class that is there or is predicted."""
        counts = self.confusion.sum(axis=1), self.confusion.sum(axis=0)
        return scores_by_label(self.labels, self.confusion.diagonal(), *counts)


def scores_by_label(
    labels: Sequence[str],
    hits: NDArray[np.int64],
    right: NDArray[np.int64],
    predicted: NDArray[np.int64],
) -> dict[str, dict[str, float]]:
    """Precision, recall, F1 and number of each label that is right or predicted anywhere.

    hits, right, predicted: how often each label is both, is right, and is predicted, [K].
    """
    return {
        label: {
            "precision": float(hits[n] / max(1, predicted[n])),
            "recall": float(hits[n] / max(1, right[n])),
            "f1": float(2 * hits[n] / (right[n] + predicted[n])),
            "count": int(right[n]),
        }
        for n, label in enumerate(labels)
        if right[n] + predicted[n]
    }


class LabelSets(Part):
    """The part of a head whose labels are right or not, each by itself."""

    def __init__(self, metric: Metric[Any], head: TaskHeadConfig, texts: Texts) -> None:
        super().__init__(metric, head, texts)
        self._counts = np.zeros((3, len(self.labels)), np.int64)  # hits, right, predicted

    def add(self, batch: MicroBatch, readings: Tensor) -> None:
        """`readings` [examples * labels, 3]: predicted or not, right or not, the label."""
        decisions = _numbers(readings)[:, :2].reshape(-1, len(self.labels), 2)
        predicted, right = decisions[..., 0] > 0, decisions[..., 1] > 0
        for row, counted in enumerate((predicted & right, right, predicted)):
            self._counts[row] += counted.sum(axis=0)
        for number, *sets in zip(self.labelled(batch), right, predicted, strict=True):
            if (sets[0] != sets[1]).any() and self.wrong.takes():
                self.wrong.keep(self.texts.example(batch, number), *map(self._names, sets))

    def _names(self, chosen: NDArray[np.bool_]) -> str:
        return ", ".join(np.array(self.labels)[chosen]) or NOTHING

    def finish(self) -> dict[str, Any]:
        if not self._counts.any():
            return {}
        return {"by_class": scores_by_label(self.labels, *self._counts), **super().finish()}


class Tags(Classes):
    """The part of a head that gives each word a tag: entities by type, or tags."""

    metric: TagMetric

    def __init__(self, metric: TagMetric, head: TaskHeadConfig, texts: Texts) -> None:
        super().__init__(metric, head, texts)
        self._has_entities = set(metric.names) != {"accuracy"}
        self._sentences: list[tuple[list[str], list[str]]] = []  # predicted and right tags

    def add(self, batch: MicroBatch, readings: Tensor) -> None:
        """`readings` [words + sentences, 2], with `END` after each sentence, a row of the batch."""
        pairs = _numbers(readings)
        words = pairs[pairs[:, 1] != END]
        np.add.at(self.confusion, (words[:, 1], words[:, 0]), 1)
        sentences = np.split(pairs, np.flatnonzero(pairs[:, 1] == END) + 1)[:-1]
        for row, sentence in enumerate(sentences):
            predicted, right = ([self.labels[tag] for tag in tags] for tags in sentence[:-1].T)
            self._sentences.append((predicted, right))
            if predicted != right and self.wrong.takes():
                self.wrong.keep(*self._told(batch, row, right, predicted))

    def _told(
        self, batch: MicroBatch, row: int, right: list[str], predicted: list[str]
    ) -> tuple[str, str, str]:
        target = batch.targets[self.metric.head]
        assert target.positions is not None
        labels, positions = (
            tensor.view(len(batch.input_ids), -1)[row]
            for tensor in (target.labels, target.positions)
        )
        starts = positions[labels != NO_LABEL] % batch.input_ids.shape[1]
        words = self.texts.words(batch, row, starts)
        wrong = [n for n, tag in enumerate(right) if tag != predicted[n]]
        label, guess = (
            ", ".join(f"{words[n]} {tags[n]}" for n in wrong) for tags in (right, predicted)
        )
        return " ".join(words), label, guess

    def by_class(self) -> dict[str, dict[str, float]]:
        if not self._has_entities:
            return super().by_class()
        predicted, right = zip(*self._sentences, strict=True)
        return scores_by_type(predicted, right)


class Choices(Part):
    """The part of a head that chooses one of the sequences of an example."""

    def add(self, batch: MicroBatch, readings: Tensor) -> None:
        """`readings` [examples, 2]: the chosen sequence and the right one."""
        for number, pair in zip(self.labelled(batch), _numbers(readings).tolist(), strict=True):
            if pair[0] != pair[1] and self.wrong.takes():
                rows = [number * batch.sequences + sequence for sequence in reversed(pair)]
                self.wrong.keep(*self._told(batch, *rows))

    def _told(self, batch: MicroBatch, right: int, chosen: int) -> tuple[str, str, str]:
        texts = [self.texts.of(self.texts.pieces(batch, row)) for row in (right, chosen)]
        passage = " | ".join(texts[0][:-1])
        return shortened(passage), texts[0][-1], texts[1][-1]


class Numbers(Part):
    """The part of a head that predicts a number: right and predicted, and the largest errors."""

    order = LARGEST

    def __init__(self, metric: Metric[Any], head: TaskHeadConfig, texts: Texts) -> None:
        super().__init__(metric, head, texts)
        self._pairs: list[NDArray[np.float64]] = []

    def add(self, batch: MicroBatch, readings: Tensor) -> None:
        """`readings` [examples, 2]: the predicted number and the right one."""
        pairs = readings.double().cpu().numpy()
        self._pairs.append(pairs)
        for number, pair in zip(self.labelled(batch), pairs.tolist(), strict=True):
            if self.wrong.takes(abs(pair[0] - pair[1])):
                shown = (f"{value:.4g}" for value in reversed(pair))
                self.wrong.keep(self.texts.example(batch, number), *shown)

    def finish(self) -> dict[str, Any]:
        if not self.wrong.count:
            return {}
        pairs = np.concatenate(self._pairs)
        some = np.random.default_rng(0).permutation(len(pairs))[:MOST_POINTS]
        points = [
            [float(f"{value:.4g}") for value in reversed(pair)] for pair in pairs[some].tolist()
        ]
        return {"points": points, **super().finish()}


class Answers(Part):
    """The part of a head that finds answers: the wrong ones beside the right ones."""

    metric: SpanMetric

    def __init__(self, metric: SpanMetric, head: TaskHeadConfig, texts: Texts) -> None:
        super().__init__(metric, head, texts)
        self._rows: list[Tensor] = []
        self._asked: dict[int, list[int]] = {}  # by the question's number

    def add(self, batch: MicroBatch, readings: Tensor) -> None:
        """`readings` as `SpanMetric.of_batch` gives them."""
        self._rows.append(readings)
        questions = batch.row_labels(SpanMetric.question(self.metric.head))
        for row, number in enumerate(questions.tolist()):
            if number != NO_LABEL and number not in self._asked:
                self._asked[number] = self.texts.pieces(batch, row)[0]

    def finish(self) -> dict[str, Any]:
        if not self._asked:
            return {}
        given, _ = self.metric.given(torch.cat(self._rows))
        for number, asked in self._asked.items():
            name, context, right = self.metric.questions[number]
            guess = given[name]
            scores = answer_scores({name: guess}, {name: right})
            if scores["exact_match"] or not self.wrong.takes():
                continue
            label = " / ".join(dict.fromkeys(right)) or NOTHING
            near = context.find((right or [guess])[0])
            text = f"{self.texts.of([asked])[0]} | {shortened(context, near)}"
            self.wrong.keep(text, label, guess or NOTHING)
        return super().finish()


class Exits(Part):
    """The part of a head with branches: how often each is right, and all together by speed."""

    def __init__(self, metric: Metric[Any], head: TaskHeadConfig, texts: Texts) -> None:
        super().__init__(metric, head, texts)
        self._rows: list[Tensor] = []

    def add(self, batch: MicroBatch, readings: Tensor) -> None:
        """`readings` as `BranchMetric.of_batch` gives them."""
        self._rows.append(readings.cpu())

    def finish(self) -> dict[str, Any]:
        """An example leaves at the first branch less uncertain than the speed, or at the last."""
        if not self._rows:
            return {}
        right, uncertain = torch.cat(self._rows).double().chunk(2, dim=1)
        layers = right.shape[1]
        exits = {
            f"layer {number}": {"accuracy": float(column.mean()), "layers": float(number)}
            for number, column in enumerate(right.unbind(dim=1), start=1)
        }
        for speed in SPEEDS:
            leaves = uncertain < speed
            leaves[:, -1] = True
            at = leaves.int().argmax(dim=1, keepdim=True)
            accuracy = float(right.gather(1, at).mean())
            exits[f"speed {speed:g}"] = {
                "accuracy": accuracy,
                "layers": float(1 + at.double().mean()),
            }
        return {"by_exit": exits if layers > 1 else {}}


def shortened(text: str, middle: int = 0) -> str:
    """At most `LONGEST` characters of a text around that of number `middle`."""
    start = max(0, min(middle - LONGEST // 2, len(text) - LONGEST))
    end = min(len(text), start + LONGEST)
    return "…" * (start > 0) + text[start:end] + "…" * (end < len(text))


def _numbers(readings: Tensor) -> NDArray[np.int64]:
    return readings.cpu().numpy().astype(np.int64)
