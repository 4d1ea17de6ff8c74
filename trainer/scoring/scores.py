"""How well masked tokens and pairs are predicted: summed loss and right answers.

Logits over the vocabulary are made a chunk at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from data_pipeline import MASKED, NO_LABEL, PAIRS
from model import Capture, Features, Model
from trainer.batches import MicroBatch
from trainer.teacher_outputs import OutputProjection

# Positions whose logits are alive together: 1024 x 50k x 4 bytes is 200 MB.
CHUNK = 1024
SUMS = 5


def capture_for(model: Model) -> Capture:
    """What `score` reads of a model's features besides its predictions."""
    return Capture(last_hidden_state=bool(model.pooled_heads()))


@torch.no_grad()
def score(features: Features, projection: OutputProjection, batch: MicroBatch) -> Tensor:
    """What is summed over held-out text, float32 [SUMS].

    Cross-entropy (nats), right top-1 predictions and number of labelled positions; right
    predictions and number of labelled pairs, 0 and 0 without a pair head.
    """
    assert features.vocabulary_input is not None
    loss = features.vocabulary_input.new_zeros((), dtype=torch.float32)
    right, right_pairs, pairs = loss.clone(), loss.clone(), loss.clone()
    labels = batch.targets[MASKED].labels.split(CHUNK)
    for logits, targets in zip(_logits(features.vocabulary_input, projection), labels, strict=True):
        loss += F.cross_entropy(logits, targets, ignore_index=NO_LABEL, reduction="sum")
        right += (logits.argmax(dim=-1) == targets).sum()
    if PAIRS in features.heads:
        right_pairs += (features.heads[PAIRS].argmax(dim=-1) == batch.row_labels(PAIRS)).sum()
        pairs += (batch.row_labels(PAIRS) != NO_LABEL).sum()
    masked = (batch.targets[MASKED].labels != NO_LABEL).sum()
    return torch.stack([loss, right, masked, right_pairs, pairs])


@torch.no_grad()
def predictions(vocabulary_input: Tensor, projection: OutputProjection) -> Tensor:
    """The most probable token at each position, [P] int64. vocabulary_input: [P, E]."""
    return torch.cat([logits.argmax(dim=-1) for logits in _logits(vocabulary_input, projection)])


def _logits(vocabulary_input: Tensor, projection: OutputProjection) -> Iterator[Tensor]:
    """Float32 logits [chunk, V] of successive positions."""
    for inputs in vocabulary_input.split(CHUNK):
        yield F.linear(inputs, projection.weight, projection.bias).float()
