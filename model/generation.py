"""Generating token by token: greedy search, and beam search with length normalisation."""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

LOWEST = -math.inf
LENGTH, GNMT = "length", "gnmt"
# What a sequence of n tokens is divided by: its length, or as in GNMT (arXiv 1609.08144, eq. 14).
DIVISORS: dict[str, Callable[[int], float]] = {LENGTH: float, GNMT: lambda n: (5 + n) / 6}


class Decoding(Protocol):
    """The decoding of N sequences, each of which has read some tokens."""

    def log_probabilities(self, tokens: Tensor) -> Tensor:
        """Read one more token of each, int64 [N]: of what comes next, float32 [N, V]."""

    def repeat(self, count: int) -> None:
        """Continue with `count` copies of each sequence, side by side."""

    def select(self, rows: Tensor) -> None:
        """Continue with these sequences, int64 [N]; each takes the place of one of its copies."""


@torch.no_grad()
def greedy_search(decoding: Decoding, start: Tensor, end: int, longest: int) -> list[list[int]]:
    """The tokens that follow `start` int64 [N], the most probable at each step, without the `end`.

    At most `longest` tokens, the end included.
    """
    tokens, written = start, []
    over = torch.zeros_like(start, dtype=torch.bool)
    for _ in range(longest):
        tokens = decoding.log_probabilities(tokens).argmax(dim=-1)
        tokens = torch.where(over, end, tokens)
        written.append(tokens)
        over |= tokens == end
        if over.all():
            break
    return [before(row, end) for row in torch.stack(written, dim=1).tolist()]


@torch.no_grad()
def beam_search(
    decoding: Decoding,
    start: Tensor,
    end: int,
    longest: int,
    beams: int,
    length_penalty: float,
    divisor: str = LENGTH,
) -> list[list[int]]:
    """The tokens that follow `start`, as in `greedy_search`, by a beam of width `beams`.

    A sequence y of n tokens, the end included, scores ``log p(y) / d(n) ** length_penalty``, where
    d is one of `DIVISORS`. Of the 2 * beams best continuations of a step, those among the first
    `beams` that end are finished, and the best that do not end go on. Search ends when nothing that
    goes on can score higher than what is finished, or at `longest` tokens, where the first `beams`
    count as finished.
    """
    search = _Beams(start, beams, length_penalty, longest, DIVISORS[divisor])
    decoding.repeat(beams)
    tokens = start.repeat_interleave(beams)
    for length in range(1, longest + 1):
        rows, tokens = search.extend(decoding.log_probabilities(tokens), length, end)
        if search.is_over(length):
            break
        decoding.select(rows)
    return [before(row, end) for row in search.best.tolist()]


class _Beams:
    """The sequences of N searches that go on, and the best finished one of each search."""

    def __init__(
        self,
        start: Tensor,
        beams: int,
        length_penalty: float,
        longest: int,
        divisor: Callable[[int], float],
    ) -> None:
        count, device = len(start), start.device
        self.beams, self.length_penalty, self.longest = beams, length_penalty, longest
        self.divisor = divisor
        self.first = torch.arange(count, device=device)[:, None] * beams  # row of the first beam
        # At first all beams are equal, so that only one of them may be continued.
        self.scores = torch.full((count, beams), LOWEST, device=device)
        self.scores[:, 0] = 0.0
        self.tokens = start.new_zeros(count, beams, longest)
        self.best = start.new_zeros(count, longest)
        self.best_score = torch.full((count,), LOWEST, device=device)

    def extend(self, chances: Tensor, length: int, end: int) -> tuple[Tensor, Tensor]:
        """Make sequences of `length` tokens. Returns rows and last tokens of those that go on.

        chances: the log probability [N * beams, V] of every next token.
        """
        vocabulary = chances.shape[1]
        totals = self.scores.flatten()[:, None] + chances
        scores, places = totals.view(len(self.scores), -1).topk(2 * self.beams, dim=1)
        origin, last = places // vocabulary, places % vocabulary
        tokens = self.tokens.gather(1, origin[..., None].expand(-1, -1, self.longest))
        tokens[:, :, length - 1] = last
        self._finish(scores, tokens, (last == end) | (length == self.longest), length)
        scores = scores.masked_fill(last == end, LOWEST)
        self.scores, chosen = scores.topk(self.beams, dim=1)
        self.tokens = tokens.gather(1, chosen[..., None].expand(-1, -1, self.longest))
        rows = self.first + origin.gather(1, chosen)
        return rows.flatten(), last.gather(1, chosen).flatten()

    def is_over(self, length: int) -> bool:
        """Whether nothing that goes on can become better than what is finished."""
        reach = self.longest if self.length_penalty > 0 else length
        bound = self.scores[:, 0] / self.divisor(reach) ** self.length_penalty
        return bool((self.best_score >= bound).all())

    def _finish(self, scores: Tensor, tokens: Tensor, ends: Tensor, length: int) -> None:
        within = scores[:, : self.beams].masked_fill(~ends[:, : self.beams], LOWEST)
        score, which = (within / self.divisor(length) ** self.length_penalty).max(dim=1)
        is_better = score > self.best_score
        finished = tokens[torch.arange(len(tokens), device=tokens.device), which]
        # What is behind the last token is not read: a sequence of full length has no end.
        finished[:, length:] = tokens.new_full((), -1)
        self.best = torch.where(is_better[:, None], finished, self.best)
        self.best_score = torch.where(is_better, score, self.best_score)


def before(tokens: list[int], end: int) -> list[int]:
    """The tokens in front of the first `end`, or in front of the first that is negative."""
    stop = next((at for at, token in enumerate(tokens) if token == end or token < 0), len(tokens))
    return tokens[:stop]
