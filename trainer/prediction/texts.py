"""Classes or numbers, predicted for texts and pairs of texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from data_pipeline.task_files.contents import suffix_of
from data_pipeline.task_files.tables import LAYOUTS, TSV, Columns, read_table
from model import REGRESSION
from trainer.objectives.task import TaskFile
from trainer.prediction.predictor import Predictor, Query

PLAIN = ("", ".txt")  # suffixes of files with one example per line and no header, like stdin


class TextPredictor(Predictor):
    """Predicts ``{"label": ..., "probabilities": {...}}``, or ``{"number": ...}``, for each row."""

    def queries(self, path: str) -> Iterator[Query]:
        fields = self.facts.fields
        layout = TSV if suffix_of(path) in PLAIN else LAYOUTS.get(suffix_of(path))
        for where, row in read_table(path, self._columns(path), layout):
            yield Query([self.encoder.sequence([row[name] for name in fields], where)])

    def answer(self, query: Query, outputs: Sequence[Tensor]) -> dict[str, Any]:
        (output,) = outputs
        if self.head.kind == REGRESSION:
            return {"number": output.item()}
        chances = output.softmax(dim=-1).tolist()
        label = self.head.labels[int(output.argmax())]
        return {"label": label, "probabilities": dict(zip(self.head.labels, chances, strict=True))}

    def _columns(self, path: str) -> Columns:
        """The columns of the texts: as in the training file or, in a plain file, in order."""
        if suffix_of(path) in PLAIN and not self.facts.columns:
            return {name: number for number, name in enumerate(self.facts.fields, start=1)}
        return TaskFile(Path(path), self.facts.columns).columns_of(*self.facts.fields)
