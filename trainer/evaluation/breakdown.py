"""What the classifying and tagging heads of a learner get right and wrong: by class, and examples.

The sizes of a breakdown in ``evaluation.json`` do not grow with the examples.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline import NO_LABEL, Vocabulary
from data_pipeline.tokenization.tokenizer import load
from model import ModelConfig
from trainer.batches import MicroBatch
from trainer.scoring.metric import Metric
from trainer.scoring.task_metrics import END, ClassMetric, TagMetric
from trainer.scoring.task_scores import scores_by_type

WRONG = 20  # examples that are kept, drawn at random with a fixed seed
MOST_LABELS = 200  # of a head; with more there is no breakdown

Wrong = dict[str, str]  # text, label and predicted


class Breakdown:
    """Reads the batches and readings of one learner, in the one process that scores it."""

    def __init__(
        self, metrics: Sequence[Metric[Any]], model: ModelConfig, tokenizer_dir: Path
    ) -> None:
        self._heads: dict[str, _Head] = {}
        self._numbers: dict[str, int] = {}  # the place of the metric that a head's part reads
        tokenizer, vocabulary = load(tokenizer_dir)
        for number, metric in enumerate(metrics):
            head = model.task_heads.get(metric.head)
            kind = _KINDS.get(type(metric))
            if kind and head and 1 < len(head.labels) <= MOST_LABELS:
                self._numbers.setdefault(metric.head, number)
                part = kind(metric, head.labels, tokenizer, vocabulary)
                self._heads.setdefault(metric.head, part)

    def add(self, batch: MicroBatch, readings: Sequence[Tensor]) -> None:
        """Add a batch, as the learner read it, with the readings of each metric."""
        for name, head in self._heads.items():
            if name in batch.targets:
                head.add(batch, readings[self._numbers[name]].cpu().numpy().astype(np.int64))

    def finish(self) -> dict[str, Any]:
        """By head: labels, confusion [right][predicted], scores by class, and wrong examples."""
        return {name: head.finish() for name, head in self._heads.items() if head.confusion.any()}


class _Head:
    """The breakdown of a head that gives each text one of its labels."""

    def __init__(
        self,
        metric: Metric[Any],
        labels: Sequence[str],
        tokenizer: tokenizers.Tokenizer,
        vocabulary: Vocabulary,
    ) -> None:
        self.metric, self.labels = metric, list(labels)
        self.confusion = np.zeros((len(labels), len(labels)), np.int64)
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._random, self._wrong, self._seen = random.Random(0), list[Wrong](), 0

    def add(self, batch: MicroBatch, pairs: NDArray[np.int64]) -> None:
        """`pairs` [examples, 2]: the predicted class and the right one."""
        np.add.at(self.confusion, (pairs[:, 1], pairs[:, 0]), 1)
        there = (batch.row_labels(self.metric.head) != NO_LABEL).nonzero()[:, 0].tolist()
        for row, (predicted, label) in zip(there, pairs.tolist(), strict=True):
            if predicted != label and (place := self._place()) is not None:
                text = " | ".join(self._texts(batch.input_ids[row], batch.attention_mask[row]))
                self._keep(place, text, self.labels[label], self.labels[predicted])

    def finish(self) -> dict[str, Any]:
        return {
            "labels": self.labels,
            "confusion": self.confusion.tolist(),
            "by_class": self.by_class(),
            "wrong": self._wrong,
            "wrong_examples": self._seen,
        }

    def by_class(self) -> dict[str, dict[str, float]]:
        """Precision, recall, F1 and number of each class that is there or is predicted."""
        right = self.confusion.diagonal()
        examples, predicted = self.confusion.sum(axis=1), self.confusion.sum(axis=0)
        return {
            label: {
                "precision": float(right[n] / max(1, predicted[n])),
                "recall": float(right[n] / max(1, examples[n])),
                "f1": float(2 * right[n] / (examples[n] + predicted[n])),
                "count": int(examples[n]),
            }
            for n, label in enumerate(self.labels)
            if examples[n] + predicted[n]
        }

    def _place(self) -> int | None:
        """The place in the list of the next wrong example; None where it is not kept."""
        self._seen += 1
        if self._seen <= WRONG:
            return self._seen - 1
        place = self._random.randrange(self._seen)
        return place if place < WRONG else None

    def _keep(self, place: int, text: str, label: str, predicted: str) -> None:
        self._wrong[place : place + 1] = [{"text": text, "label": label, "predicted": predicted}]

    def _texts(self, ids: Tensor, mask: Tensor) -> Iterator[str]:
        """The texts of an example, as the model has read them."""
        ends = {self._vocabulary.cls, self._vocabulary.sep}
        part: list[int] = []
        for token in [*ids[mask].tolist(), self._vocabulary.sep]:
            if token not in ends:
                part.append(token)
            elif part:
                yield self._tokenizer.decode(part)
                part = []


class _Tags(_Head):
    """The breakdown of a head that gives each word a tag: entities by type, or tags."""

    def __init__(self, metric: TagMetric, *others: Any) -> None:
        super().__init__(metric, *others)
        self._has_entities = set(metric.names) != {"accuracy"}
        self._sentences: list[tuple[list[str], list[str]]] = []  # predicted and right tags

    def add(self, batch: MicroBatch, pairs: NDArray[np.int64]) -> None:
        """`pairs` [words + sentences, 2], with `END` after each sentence, a row of the batch."""
        words = pairs[pairs[:, 1] != END]
        np.add.at(self.confusion, (words[:, 1], words[:, 0]), 1)
        target = batch.targets[self.metric.head]
        assert target.positions is not None
        rows = len(batch.input_ids)
        labels, positions = target.labels.view(rows, -1), target.positions.view(rows, -1)
        sentences = np.split(pairs, np.flatnonzero(pairs[:, 1] == END) + 1)[:-1]
        for row, sentence in enumerate(sentences):
            predicted, right = ([self.labels[tag] for tag in tags] for tags in sentence[:-1].T)
            self._sentences.append((predicted, right))
            if predicted != right and (place := self._place()) is not None:
                starts = positions[row][labels[row] != NO_LABEL] % batch.input_ids.shape[1]
                text = self._words(batch.input_ids[row], batch.attention_mask[row], starts)
                wrong = [n for n, tag in enumerate(right) if tag != predicted[n]]
                told = (
                    ", ".join(f"{text[n]} {tags[n]}" for n in wrong) for tags in (right, predicted)
                )
                self._keep(place, " ".join(text), *told)

    def by_class(self) -> dict[str, dict[str, float]]:
        if not self._has_entities:
            return super().by_class()
        predicted, right = zip(*self._sentences, strict=True)
        return scores_by_type(predicted, right)

    def _words(self, ids: Tensor, mask: Tensor, starts: Tensor) -> list[str]:
        """The words that begin at these positions; the last one ends before [SEP]."""
        ends = torch.cat([starts[1:], mask.sum()[None] - 1])
        spans = zip(starts.tolist(), ends.tolist(), strict=True)
        return [self._tokenizer.decode(ids[start:end].tolist()).strip() for start, end in spans]


_KINDS: Mapping[type, type[_Head]] = {ClassMetric: _Head, TagMetric: _Tags}
