"""The right one of several choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from data_pipeline.task_files.multiple_choice import read_multiple_choice
from trainer.prediction.predictor import Predictor, Query


class ChoicePredictor(Predictor):
    """Answers each question with ``{"id", "choice", "answer", "probabilities"}``."""

    def queries(self, path: str) -> Iterator[Query]:
        for one in read_multiple_choice(path, False, self.facts.encoding):
            texts = [[one.passage, one.with_choice(choice)] for choice in one.choices]
            yield Query([self.encoder.sequence(pair, one.where) for pair in texts], one)

    def answer(self, query: Query, outputs: Sequence[Tensor]) -> dict[str, Any]:
        scores = torch.cat(list(outputs))
        best, question = int(scores.argmax()), query.source
        return {
            "id": question.id,
            "choice": best,
            "answer": question.choices[best],
            "probabilities": scores.softmax(dim=0).tolist(),
        }
