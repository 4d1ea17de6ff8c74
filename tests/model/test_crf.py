"""The conditional random field against enumerating all sequences of tags."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torchcrf import CRF

from model.heads import Transitions, decode, log_likelihood

TAGS, LENGTH = 3, 5
# Text 0 is whole, text 1 ends early, text 2 has gaps, text 3 has one word, text 4 none.
MASK = torch.tensor(
    [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]]
).bool()


@pytest.fixture
def inputs() -> tuple[Tensor, Transitions, Tensor]:
    generator = torch.Generator().manual_seed(3)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    transitions = Transitions(normal(TAGS, TAGS), normal(TAGS), normal(TAGS))
    tags = torch.randint(0, TAGS, MASK.shape, generator=generator).masked_fill(~MASK, -100)
    return normal(*MASK.shape, TAGS), transitions, tags


def score(emissions: Tensor, transitions: Transitions, tags: tuple[int, ...]) -> float:
    """The score of one sequence of tags; emissions are [places, K]."""
    total = transitions.first[tags[0]] + transitions.last[tags[-1]]
    total = total + sum(emissions[place, tag] for place, tag in enumerate(tags))
    return float(total + sum(transitions.between[a, b] for a, b in itertools.pairwise(tags)))


def test_likelihood_and_best_tags_equal_those_of_all_sequences(inputs) -> None:
    emissions, transitions, tags = inputs
    got = log_likelihood(emissions, transitions, tags, MASK)
    best = decode(emissions, transitions, MASK)
    for row in range(4):
        here = MASK[row]
        own = emissions[row, here]
        scores = {
            one: score(own, transitions, one)
            for one in itertools.product(range(TAGS), repeat=int(here.sum()))
        }
        partition = torch.logsumexp(torch.tensor(list(scores.values())), dim=0)
        expected = scores[tuple(tags[row, here].tolist())] - partition
        torch.testing.assert_close(got[row], expected)
        assert tuple(best[row, here].tolist()) == max(scores, key=scores.__getitem__)
    assert (best[~MASK] == -1).all()


def test_a_text_without_words_counts_nothing(inputs) -> None:
    emissions, transitions, tags = inputs
    emissions.requires_grad_()
    got = log_likelihood(emissions, transitions, tags, MASK)
    assert got[4] == 0
    (gradient,) = torch.autograd.grad(got.sum(), emissions)
    assert (gradient[~MASK] == 0).all()
    assert (gradient[MASK] != 0).any()


def test_likelihood_and_best_tags_are_those_of_pytorch_crf(inputs) -> None:
    published = CRF(TAGS, batch_first=True)
    emissions, transitions, tags = (one[:2] if isinstance(one, Tensor) else one for one in inputs)
    mask = MASK[:2]  # its masks have no gaps
    with torch.no_grad():
        published.transitions.copy_(transitions.between)
        published.start_transitions.copy_(transitions.first)
        published.end_transitions.copy_(transitions.last)
    expected = published(emissions, tags.clamp(min=0), mask, reduction="none")
    torch.testing.assert_close(log_likelihood(emissions, transitions, tags, mask), expected)
    best = decode(emissions, transitions, mask)
    assert [row[own].tolist() for row, own in zip(best, mask, strict=True)] == published.decode(
        emissions, mask
    )
