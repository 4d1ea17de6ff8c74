"""Tokens drawn of a teacher's predictions: an unbiased target in a few bytes.

The k largest logits alone are a biased target: the tokens that they leave out get no probability.
The share of each token among draws from the distribution has its probability as expectation, and
so has every loss that is linear in the target (random sampling distillation, arXiv 2503.16870).
Here one token is drawn from each n-th part of the distribution, in the order of the vocabulary:
the expectation is that of independent draws, and the variance is never larger.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.hashing import TeacherDraw, array_keys, random_uint32, scalar_key

_ONE = 2.0**40  # a probability of 1 as a whole number: sums are exact in any order


def uniforms(
    seed: int,
    epochs: NDArray[np.int64],
    sample_ids: NDArray[np.int64],
    columns: NDArray[np.int64],
    samples: int,
) -> NDArray[np.float64]:
    """Numbers in (0, 1) for the draws [P, samples] at P positions: a hash of what they are for.

    epochs, sample_ids, columns: of each position, [P].
    """
    keys = array_keys(scalar_key(seed, TeacherDraw.TOKENS), epochs, sample_ids)
    counters = columns[:, None] * samples + np.arange(samples)
    return (random_uint32(keys, counters) + 0.5) / 2**32


def draw(logits: Tensor, numbers: Tensor, temperature: float) -> Tensor:
    """Tokens drawn from softmax(logits / T), ascending in each row: int64 [P, samples].

    logits: [P, V]; numbers: in (0, 1), float64 [P, samples].
    """
    weights = ((logits.double() / temperature).softmax(dim=1) * _ONE).round().long()
    ends = weights.cumsum(dim=1)
    samples = numbers.shape[1]
    parts = (torch.arange(samples, device=logits.device) + numbers) / samples
    return torch.searchsorted(ends, (parts * ends[:, -1:]).long(), right=True)


def as_logits(tokens: Tensor, temperature: float) -> Tensor:
    """Logits of drawn tokens [P, samples] whose softmax at T is each token's share: float32.

    A token that was drawn several times has the same logit in each place.
    """
    counts = (tokens[:, :, None] == tokens[:, None, :]).sum(dim=2)
    return temperature * counts.float().log()
