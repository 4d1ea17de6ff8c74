"""SQuAD's scores of answer spans, and the threshold above which a question gets no answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from data_pipeline import NO_LABEL
from trainer.batches import MicroBatch
from trainer.scoring.answer_spans import WIDTH, best_answers, window_rows
from trainer.scoring.column import NUMBER, SHARE, Column
from trainer.scoring.metric import GatheredMetric
from trainer.scoring.scores import ScoreInputs
from trainer.scoring.task_scores import answer_scores

ANSWER_SCORES = ("answer_f1", "exact_match")
THRESHOLD = "null_threshold"


RightAnswers = list[tuple[str, str, list[str]]]  # of each question: id, passage, right answers


class SpanMetric(GatheredMetric[ScoreInputs]):
    """Exact match and F1 of the answers, as SQuAD's scripts count them.

    A span (i, j) has j >= i and at most `longest` tokens; its score is the sum of its two logits. A
    question is answered by its best window. Where questions may be `unanswerable`, no answer is
    given if its score exceeds that of the best span by more than a threshold. Without a `known`
    threshold, the one with the highest F1 on these examples is chosen.
    """

    width = WIDTH

    def __init__(
        self,
        head: str,
        names: Sequence[str],
        answers: Callable[[], RightAnswers],
        longest: int,
        unanswerable: bool,
        known: float | None = None,
    ) -> None:
        self.head, self.names, self.answers = head, tuple(names), answers
        self.longest, self.unanswerable, self.known = longest, unanswerable, known
        shown = [Column(f"{head}_{name}", name, SHARE) for name in names]
        threshold = [Column(self.threshold(head), "threshold", NUMBER)] * unanswerable
        self.columns = (*shown, *threshold)

    @staticmethod
    def threshold(head: str) -> str:
        """The column of the threshold."""
        return f"{head}_{THRESHOLD}"

    @staticmethod
    def question(head: str) -> str:
        """The target that holds the number of a window's question in its file."""
        return f"{head}_question"

    @staticmethod
    def begins(head: str) -> str:
        """The target that holds the first character of each token of the passage."""
        return f"{head}_begins"

    @staticmethod
    def ends(head: str) -> str:
        """The target that holds the character after the last of each token of the passage."""
        return f"{head}_ends"

    @cached_property
    def questions(self) -> RightAnswers:
        return self.answers()

    def tuned_on(self, scores: Mapping[str, float | None]) -> SpanMetric:
        settings = self.names, self.answers, self.longest, self.unanswerable
        return SpanMetric(self.head, *settings, known=scores.get(self.threshold(self.head)))

    @torch.no_grad()
    def of_batch(self, outputs: ScoreInputs) -> Tensor:
        """[windows, WIDTH]: the best span of each window."""
        batch = outputs.batch
        if self.question(self.head) not in batch.targets:
            return self.empty(batch.input_ids.device)
        rows = best_spans(outputs.features.heads[self.head].float(), batch, self.head, self.longest)
        return rows[rows[:, 0] != NO_LABEL]

    def finish(self, total: Tensor) -> dict[str, float]:
        if not len(total):
            return {}
        texts, threshold = self.given(total)
        scores = answer_scores(texts, self._right)
        shown = {f"{self.head}_{name}": scores[name] for name in self.names}
        return shown if threshold is None else {**shown, self.threshold(self.head): threshold}

    def given(self, total: Tensor) -> tuple[dict[str, str], float | None]:
        """The answer to each question, by its id, and the threshold above which it is empty."""
        best = best_answers(total.cpu().numpy(), [context for _, context, _ in self.questions])
        found = {self.questions[number][0]: answer for number, answer in best.items()}
        texts = {name: one.span.text for name, one in found.items()}
        if not self.unanswerable:
            return texts, None
        margins = {name: one.margin for name, one in found.items()}
        known = self.known
        threshold = best_threshold(texts, margins, self._right) if known is None else known
        return {
            name: texts[name] if one.given(threshold) else "" for name, one in found.items()
        }, threshold

    @property
    def _right(self) -> dict[str, list[str]]:
        return {name: answers for name, _, answers in self.questions}


def best_spans(logits: Tensor, batch: MicroBatch, head: str, longest: int) -> Tensor:
    """The best span of the passage in each window: float64 [B, WIDTH]. logits: [B, L, 2]."""
    begins, ends = batch.targets[SpanMetric.begins(head)], batch.targets[SpanMetric.ends(head)]
    assert begins.positions is not None
    windows, flat = len(logits), logits.flatten(0, 1)
    at_tokens = flat.index_select(0, begins.positions).view(windows, -1, 2)  # [B, M, 2]
    at_tokens = at_tokens.masked_fill(
        (begins.labels == NO_LABEL).view(windows, -1, 1), float("-inf")
    )
    return window_rows(
        batch.row_labels(SpanMetric.question(head)),
        at_tokens,
        logits[:, 0].sum(dim=1),
        begins.labels.view(windows, -1),
        ends.labels.view(windows, -1),
        longest,
    )


def best_threshold(
    texts: Mapping[str, str], margins: Mapping[str, float], right: Mapping[str, Sequence[str]]
) -> float:
    """The threshold on the margin of "no answer" over the best span that gives the highest F1.

    `texts`, `margins` and `right` are by question. The threshold is one of the margins, or below
    all of them where never answering is best.
    """
    ordered = sorted(margins, key=lambda name: margins[name])
    gains = [0.0]  # gain from answering the questions up to each one, over answering none
    for name in ordered:
        answered, silent = (
            answer_scores({name: text}, {name: right[name]})["answer_f1"]
            for text in (texts[name], "")
        )
        gains.append(gains[-1] + answered - silent)
    best = int(np.argmax(gains))
    return margins[ordered[best - 1]] if best else margins[ordered[0]] - 1.0
