"""The outputs of a task's head for many sequences, batched by similar length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline import Vocabulary
from model import Capture, Model
from trainer.batches import rows_by_length

# Tokens in one forward pass, padding included. A CPU is as fast with 1,024 per thread as with more,
# and small passes waste less on padding.
TOKENS_ON_GPU, TOKENS_PER_THREAD = 1 << 13, 1 << 10
Segments = Sequence[NDArray[np.integer]]  # token ids of one sequence, without special tokens


@torch.inference_mode()
def head_outputs(
    model: Model,
    head: str,
    vocabulary: Vocabulary,
    sequences: Sequence[Segments],
) -> list[Tensor]:
    """The head's output for each sequence, in the order given; float32 on the CPU.

    The shape is [outputs], or [L, outputs] for a head with an output per token, where L is the
    length of the sequence with its special tokens. The longest sequences run first.
    """
    outputs: list[Tensor] = [torch.empty(0)] * len(sequences)
    per_token = model.config.task_heads[head].per_token
    lengths = [_length(segments) for segments in sequences]
    for rows in rows_by_length(lengths, tokens_per_pass(next(model.parameters()).device)):
        found = _of_pass(model, head, vocabulary, [sequences[row] for row in rows])
        for row, output in zip(rows, found.float().cpu(), strict=True):
            outputs[row] = output[: lengths[row]] if per_token else output
    return outputs


def tokens_per_pass(device: torch.device) -> int:
    """The most tokens that one forward pass should hold on this device."""
    if device.type != "cpu":
        return TOKENS_ON_GPU
    return min(TOKENS_ON_GPU, TOKENS_PER_THREAD * torch.get_num_threads())


def _length(segments: Segments) -> int:
    """The length in tokens, with [CLS] and with [SEP] after each segment."""
    return 1 + sum(len(segment) + 1 for segment in segments)


def _of_pass(model: Model, head: str, vocabulary: Vocabulary, sequences: list[Segments]) -> Tensor:
    lengths = np.array([_length(segments) for segments in sequences])
    ids = np.full((len(sequences), lengths.max()), vocabulary.pad, np.int64)
    second = np.zeros_like(ids)  # 1 in the second segment
    for row, segments in enumerate(sequences):
        parts = [part for segment in segments for part in (segment, [vocabulary.sep])]
        ids[row, : lengths[row]] = np.concatenate([[vocabulary.cls], *parts])
        second[row, 2 + len(segments[0]) : lengths[row]] = 1
    device = next(model.parameters()).device
    tensors = [torch.from_numpy(array).to(device) for array in (ids, second, lengths)]
    found = model.features(
        tensors[0],
        tensors[1] if model.config.reads_segments else None,
        tensors[2] if lengths.min() < lengths.max() else None,
        capture=Capture(heads=(head,)),
    )
    return found.heads[head]
