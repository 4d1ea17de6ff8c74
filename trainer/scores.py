"""How well masked tokens are predicted: summed loss and right answers, a chunk at a time."""

from __future__ import annotations

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
    for inputs, targets in zip(vocabulary_input.split(CHUNK), labels.split(CHUNK), strict=True):
        logits = F.linear(inputs, decoder.weight, decoder.bias).float()  # [chunk, V]
        loss += F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        correct += (logits.argmax(dim=-1) == targets).sum()
    return loss, correct
