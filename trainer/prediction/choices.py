"""The right one of several choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from data_pipeline import EmptyText
from data_pipeline.task_files.multiple_choice import read_multiple_choice
from trainer.prediction.passes import Segments
from trainer.prediction.predictor import Predictor, Query


class ChoicePredictor(Predictor):
    """Answers each question with ``{"id", "choice", "answer", "probabilities"}``.

    All but the id is null where a text is missing.
    """

    def queries(self, path: str) -> Iterator[Query]:
        for question in read_multiple_choice(path, False, self.facts.encoding):
            texts = [question.texts_with(choice) for choice in question.choices]
            sequences: list[Segments] = []
            with suppress(EmptyText):
                sequences = [self.encoder.sequence(read, question.where) for read in texts]
            self.unanswered += not sequences
            yield Query(sequences, question)

    def answer(self, query: Query, outputs: Sequence[Tensor]) -> dict[str, Any]:
        question = query.source
        if not outputs:
            return {"id": question.id, "choice": None, "answer": None, "probabilities": None}
        scores = torch.cat(list(outputs))
        best = int(scores.argmax())
        return {
            "id": question.id,
            "choice": best,
            "answer": question.choices[best],
            "probabilities": scores.softmax(dim=0).tolist(),
        }
