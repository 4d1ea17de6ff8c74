"""How well masked tokens are predicted: summed loss and right answers, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.knowledge import Decoder

# Positions whose logits are alive together: 1024 x 50k x 4 bytes is 200 MB.
CHUNK = 1024


@torch.no_grad()
def masked_lm_scores(
    vocabulary_input: Tensor, decoder: Decoder, labels: Tensor
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy (nats) and number of right top-1 predictions at labelled positions.

    vocabulary_input: [P, E]; labels: [P] int64, -100 where nothing is asked. Scalars, float32.
    """
    loss = vocabulary_input.new_zeros((), dtype=torch.float32)
    correct = loss.clone()
    chunks = zip(_logits(vocabulary_input, decoder), labels.split(CHUNK), strict=True)
    for logits, targets in chunks:
        loss += F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        correct += (logits.argmax(dim=-1) == targets).sum()
    return loss, correct


@torch.no_grad()
def predictions(vocabulary_input: Tensor, decoder: Decoder) -> Tensor:
    """The most probable token at each position, [P] int64. vocabulary_input: [P, E]."""
    return torch.cat([logits.argmax(dim=-1) for logits in _logits(vocabulary_input, decoder)])


def _logits(vocabulary_input: Tensor, decoder: Decoder) -> Iterator[Tensor]:
    """Float32 logits [chunk, V] of successive positions."""
    for inputs in vocabulary_input.split(CHUNK):
        yield F.linear(inputs, decoder.weight, decoder.bias).float()
