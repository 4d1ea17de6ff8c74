"""Answer spans in passages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from data_pipeline import EmptyText
from data_pipeline.task_files.squad import SpanQuestion, read_squad
from trainer.prediction.predictor import Predictor, Query
from trainer.scoring.span_metric import SpanMetric, best_answers, window_rows
from trainer.tasks.span import ReadQuestion, Span


@dataclass(frozen=True)
class _Windows:
    question: SpanQuestion
    read: ReadQuestion | None  # None: there is no text


class SpanPredictor(Predictor):
    """Answers each question with ``{"id", "answer", "start", "score"}``.

    Where questions may be unanswerable, the score of "no answer" is added. The answer and its start
    are null if that score is higher by more than the threshold found in training (default 0), and
    all is null where there is no question or no passage.
    """

    def queries(self, path: str) -> Iterator[Query]:
        for question in read_squad(path, False, self.facts.encoding):
            read = None
            with suppress(EmptyText):
                read = self._task.read(question, self.encoder)
            if read is None:
                self.unanswered += 1
                yield Query([], _Windows(question, None))
                continue
            asked = self.encoder.array(read.asked)
            windows = [self.encoder.array(read.ids[window]) for window in read.windows]
            yield Query([[asked, window] for window in windows], _Windows(question, read))

    def answer(self, query: Query, outputs: Sequence[Tensor]) -> dict[str, Any]:
        question, task = query.source.question, self._task
        if not outputs:
            nothing = dict.fromkeys(("answer", "start", "score"))
            return {"id": question.id or None, **nothing} | (
                {"no_answer_score": None} if task.unanswerable else {}
            )
        rows = torch.cat(list(self._rows(query.source.read, outputs)))
        best = best_answers(rows.numpy(), [question.context])[0]
        threshold = None
        if task.unanswerable:
            threshold = self.facts.scores.get(SpanMetric.threshold(task.head), 0.0)
        given = best.given(threshold)
        best_answer = {
            "id": question.id,
            "answer": given.text if given else None,
            "start": given.start if given else None,
            "score": best.score,
        }
        return (
            {**best_answer, "no_answer_score": best.no_answer} if task.unanswerable else best_answer
        )

    def _rows(self, read: ReadQuestion, outputs: Sequence[Tensor]) -> Iterator[Tensor]:
        """The best span of each window."""
        for window, logits in zip(read.windows, outputs, strict=True):
            begins = torch.from_numpy(read.begins_in(window))[None]
            ends = torch.from_numpy(read.ends[window])[None]
            at_tokens = logits[None, read.first_column : read.first_column + begins.shape[1]]
            none = logits[:1].sum(dim=1)
            number = torch.zeros(1)
            yield window_rows(number, at_tokens, none, begins, ends, self._task.longest_answer)

    @cached_property
    def _task(self) -> Span:
        return self.facts.section(Span)
