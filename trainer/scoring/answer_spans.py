"""Answer spans: the best span of each window, and the best window of each question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.task_files.squad import AnswerSpan

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
    return torch.stack([one.double() for one in rows], dim=1)


def best_answers(rows: NDArray[np.float64], contexts: Sequence[str]) -> dict[int, BestAnswer]:
    """Question number -> the answer of its best window; `contexts` has one passage per question."""
    found: dict[int, BestAnswer] = {}
    for number, row in _best_windows(rows).items():
        begin, end = int(row[3]), int(row[4])
        text = contexts[number][begin:end]
        start = begin + len(text) - len(text.lstrip())
        found[number] = BestAnswer(AnswerSpan(text.strip(), start), float(row[1]), float(row[2]))
    return found


def _best_windows(rows: NDArray[np.float64]) -> dict[int, NDArray[np.float64]]:
    """Question -> the row of its best window, with the lowest "no answer" score of its windows."""
    found: dict[int, NDArray[np.float64]] = {}
    for row in rows[np.lexsort((rows[:, 3], -rows[:, 1], rows[:, 0]))]:
        best = found.setdefault(int(row[0]), row.copy())
        best[2] = min(best[2], row[2])
    return found
