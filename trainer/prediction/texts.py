"""Classes, labels or numbers, predicted for texts and pairs of texts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_pipeline import EmptyText
from data_pipeline.errors import BadNumber
from data_pipeline.task_files.tables import (
    TSV,
    Row,
    as_number,
    column_names,
    header_of,
    read_plain_lines,
    read_table,
)
from data_pipeline.text.text_files import STDIN, suffix_of
from model import MULTI_LABEL, REGRESSION
from trainer.objectives.task import TaskFile
from trainer.prediction.fine_tuned import Predictor, Query, Segments
from trainer.scoring.task_metrics import CosineMetric
from trainer.task_facts import TaskFacts
from trainer.tasks.bi_encoder import BiEncoder
from trainer.tasks.sentences import SentencePair
from trainer.tasks.vectors import Vectors

PLAIN = ("", ".txt")  # suffixes of files with one example per line and no header, like stdin


def with_places(facts: TaskFacts, path: str, numbers: Sequence[str] = ()) -> TaskFacts:
    """The facts with the columns that this file has of the texts, which training's may not be.

    `numbers` are the fields besides texts.
    Standard input and a plain file are lines of texts, unless the first line of the file is that of
    training, or has the numbered columns of training.
    """
    is_plain = bool(facts.fields) and suffix_of(path) in PLAIN
    names = {name: facts.columns.get(name, name) for name in (*facts.fields, *numbers)}
    if is_plain and path != STDIN:
        cells = header_of(path, facts.encoding)
        places = TaskFile(Path(path), facts.columns).columns_of(*facts.columns).values()
        last = max((place for place in places if isinstance(place, int)), default=0)
        if {*names.values()} <= {*cells} or len(names) < last <= len(cells):
            return replace(facts, columns=names)
    return replace(facts, columns={}) if path == STDIN or is_plain else facts


def with_pairs(facts: TaskFacts, path: str, columns: Mapping[str, str]) -> TaskFacts:
    """The facts with the texts of pairs, for a model that does not say what it was trained on.

    It reads pairs where the file has their columns, or the user names them in `columns`, unless
    these name the column of single texts.
    """
    if facts.settings or facts.columns or {*columns} & {*facts.fields}:
        return facts
    names = [*columns]
    if path != STDIN:
        names += (header_of if suffix_of(path) in PLAIN else column_names)(path, facts.encoding)
    texts = SentencePair().texts
    return replace(facts, fields=texts) if {*texts} <= {*names} else facts


def read_rows(path: str, facts: TaskFacts, numbers: Sequence[str] = ()) -> Iterator[Row]:
    """The texts and `numbers` of each example, in the columns of `with_places`.

    A plain file has no other columns.
    """
    is_plain, fields = suffix_of(path) in PLAIN, (*facts.fields, *numbers)
    if is_plain and not facts.columns:
        return read_plain_lines(path, fields, facts.encoding)
    columns = TaskFile(Path(path), facts.columns).columns_of(*fields)
    layout = TSV if is_plain else None
    return read_table(path, columns, layout, encoding=facts.encoding, numbers=numbers)


class TextPredictor(Predictor):
    """Predicts ``{"label": ..., "probabilities": {...}}``, or ``{"number": ...}``, for each row.

    With labels that are right or not each by itself, ``{"labels": [...], "probabilities": {...}}``.
    A row without a text, or without a number that the head reads beside it, has null in their
    place, and is counted.
    """

    def queries(self, path: str) -> Iterator[Query]:
        names = self.head.numbers
        for where, row in read_rows(path, self.facts, names):
            texts = [row.get(name, "") for name in self.facts.fields]
            sequences: list[Segments] = []
            numbers: list[float] = []
            with suppress(EmptyText, BadNumber):  # row N gets answer N, also where it has none
                numbers = [as_number(where, name, row.get(name, "")) for name in names]
                sequences = self._sequences(texts, where)
            self.unanswered += not sequences
            yield Query(sequences, numbers=numbers)

    def _sequences(self, texts: Sequence[str], where: str) -> list[Segments]:
        """The sequences of a row. Raises EmptyText where a text is empty."""
        return [self.encoder.sequence(texts, where)]

    def answer(self, query: Query, outputs: Sequence[Tensor]) -> dict[str, Any]:
        if not outputs:
            return self._nothing()
        (output,) = outputs
        if self.head.kind == REGRESSION:
            return {"number": output.item()}
        if self.head.kind == MULTI_LABEL:
            chances = self._by_label(output.sigmoid())
            right = [label for label, chance in chances.items() if chance > 0.5]
            return {"labels": right, "probabilities": chances}
        label = self.head.labels[int(output.argmax())]
        return {"label": label, "probabilities": self._by_label(output.softmax(dim=-1))}

    def _nothing(self) -> dict[str, Any]:
        """The answer for a row without a text."""
        if self.head.kind == REGRESSION:
            return {"number": None}
        return {"labels" if self.head.kind == MULTI_LABEL else "label": None, "probabilities": None}

    def _by_label(self, chances: Tensor) -> dict[str, float]:
        return dict(zip(self.head.labels, chances.tolist(), strict=True))


class TextVectorPredictor(TextPredictor):
    """Predicts ``{"vector": [...]}`` for each text; null for a blank one."""

    def _sequences(self, texts: Sequence[str], where: str) -> list[Segments]:
        return super()._sequences(
            [self._prefix + text if text.strip() else text for text in texts], where
        )

    def answer(self, query: Query, outputs: Sequence[Tensor]) -> dict[str, Any]:
        return {"vector": outputs[0].tolist() if outputs else None}

    @cached_property
    def _prefix(self) -> str:
        return self.facts.section(Vectors).prefix if self.facts.settings else ""


class SimilarityPredictor(TextPredictor):
    """Predicts ``{"number": ...}`` for each pair: the cosine, on the scale of the labels."""

    def _sequences(self, texts: Sequence[str], where: str) -> list[Segments]:
        return [self.encoder.sequence([text], where) for text in texts]

    def answer(self, query: Query, outputs: Sequence[Tensor]) -> dict[str, Any]:
        if not outputs:
            return {"number": None}
        cosine = CosineMetric.cosines(torch.stack(list(outputs))).item()
        return {"number": cosine * self.facts.section(BiEncoder).highest}
