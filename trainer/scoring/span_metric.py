"""SQuAD's scores of answer spans, and the threshold above which a question gets no answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline import NO_LABEL
from data_pipeline.task_files.questions import AnswerSpan
from trainer.batches import MicroBatch
from trainer.scoring.columns import NUMBER, SHARE, Column
from trainer.scoring.metric import GatheredMetric
from trainer.scoring.scores import ScoreInputs
from trainer.scoring.task_scores import answer_scores

# A row: question, score of the best span, score of no answer, the span's first and last character.
WIDTH = 5


@dataclass(frozen=True)
class BestAnswer:
    """The best span for a question, over all of its windows.

    score: the sum of its two logits. no_answer: the lowest score of "no answer" in any window.
    """

    span: AnswerSpan
    score: float
    no_answer: float

    @property
    def margin(self) -> float:
        """The score of "no answer" minus the score of the span."""
        return self.no_answer - self.score

    def given(self, threshold: float | None) -> AnswerSpan | None:
        """The span's text, or None where `margin` exceeds the threshold (None: no threshold)."""
        return None if threshold is not None and self.margin > threshold else self.span


def window_rows(
    questions: Tensor,
    at_tokens: Tensor,
    no_answer: Tensor,
    begins: Tensor,
    ends: Tensor,
    longest: int,
) -> Tensor:
    """The best span of each of B windows, float64 [B, WIDTH]: j >= i, at most `longest` tokens.

    questions: the number of each window's question, [B]. at_tokens: the logits of M tokens, [B, M,
    2], -inf where a span may not begin or end. no_answer: the score of "no answer", [B]. begins,
    ends: the characters at which the tokens begin and end, [B, M]; no span has a negative one.
    """
    scores = at_tokens[:, :, None, 0] + at_tokens[:, None, :, 1]  # [B, first, last]
    allowed = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
    allowed = allowed.triu() & allowed.tril(longest - 1) & (begins >= 0)[:, :, None]
    best, place = scores.masked_fill(~allowed, float("-inf")).flatten(1).max(dim=1)
    first, last = place // scores.shape[1], place % scores.shape[1]
    first_character = begins.gather(1, first[:, None])[:, 0]
    last_character = ends.gather(1, last[:, None])[:, 0]
    rows = (questions, best, no_answer, first_character, last_character)
    return torch.stack([column.double() for column in rows], dim=1)


def best_answers(rows: NDArray[np.float64], contexts: Sequence[str]) -> dict[int, BestAnswer]:
    """Question number -> the answer of its best window; `contexts` has one passage per question."""
    answers: dict[int, BestAnswer] = {}
    for number, row in _best_windows(rows).items():
        begin, end = int(row[3]), int(row[4])
        text = contexts[number][begin:end]
        start = begin + len(text) - len(text.lstrip())
        answers[number] = BestAnswer(AnswerSpan(text.strip(), start), float(row[1]), float(row[2]))
    return answers


def _best_windows(rows: NDArray[np.float64]) -> dict[int, NDArray[np.float64]]:
    """Question -> the row of its best window, with the lowest "no answer" score of its windows."""
    windows: dict[int, NDArray[np.float64]] = {}
    for row in rows[np.lexsort((rows[:, 3], -rows[:, 1], rows[:, 0]))]:
        best = windows.setdefault(int(row[0]), row.copy())
        best[2] = min(best[2], row[2])
    return windows


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
        answers = {self.questions[number][0]: answer for number, answer in best.items()}
        texts = {name: answer.span.text for name, answer in answers.items()}
        if not self.unanswerable:
            return texts, None
        margins = {name: answer.margin for name, answer in answers.items()}
        known = self.known
        threshold = best_threshold(texts, margins, self._right) if known is None else known
        return {
            name: texts[name] if answer.given(threshold) else "" for name, answer in answers.items()
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
    all of them where never answering is best. Questions of equal margins are answered together.
    """
    ordered = sorted(margins, key=lambda name: margins[name])
    gains = [0.0]  # gain from answering the questions up to each one, over answering none
    for name in ordered:
        answered, silent = (
            answer_scores({name: text}, {name: right[name]})["answer_f1"]
            for text in (texts[name], "")
        )
        gains.append(gains[-1] + answered - silent)
    values = [margins[name] for name in ordered]
    breaks = [place for place, value in enumerate(values[1:], 1) if value > values[place - 1]]
    best = max([0, *breaks, len(values)], key=gains.__getitem__)
    return values[best - 1] if best else values[0] - 1.0
