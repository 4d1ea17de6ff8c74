"""The pseudo-log-likelihood of sentences under a masked language model.

For a sentence w it is the sum over its tokens of log P(w_t | w without w_t), where each token is
masked alone (Salazar et al., 2020, arXiv 1910.14659). It needs no fine-tuning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.nn import functional as F

from data_pipeline import Vocabulary
from model import Model
from trainer.batches import rows_by_length

TOKENS = 1 << 14  # in one forward pass


@torch.inference_mode()
def pseudo_log_likelihoods(
    model: Model,
    vocabulary: Vocabulary,
    sentences: Sequence[Sequence[int]],
    tokens_per_pass: int = TOKENS,
) -> np.ndarray:
    """The sum of log-probabilities (nats) of the tokens of each sentence, float64 [sentences].

    `sentences` are token ids without special tokens. Each token gives one row, in which it is
    masked; rows of similar length share a forward pass. The model must be in evaluation mode.
    """
    total = np.zeros(len(sentences))
    for rows in _passes([len(sentence) + 2 for sentence in sentences], tokens_per_pass):
        found = _log_probabilities(model, vocabulary, sentences, rows)
        np.add.at(total, rows[:, 0], found.double().cpu().numpy())
    return total


def _passes(lengths: Sequence[int], tokens_per_pass: int) -> Iterator[np.ndarray]:
    """The rows of each pass as (sentence, position in it), [rows, 2]; longest sentences first."""
    rows = [(number, place) for number, one in enumerate(lengths) for place in range(one - 2)]
    for chosen in rows_by_length([lengths[number] for number, _ in rows], tokens_per_pass):
        yield np.array([rows[row] for row in chosen])


def _log_probabilities(
    model: Model,
    vocabulary: Vocabulary,
    sentences: Sequence[Sequence[int]],
    rows: np.ndarray,
) -> torch.Tensor:
    """The log-probability of the token that each row masks: float32 [rows]."""
    lengths = np.array([len(sentences[number]) + 2 for number in rows[:, 0]])
    ids = np.full((len(rows), lengths.max()), vocabulary.pad, np.int64)
    for row, (number, _) in enumerate(rows):
        ids[row, : lengths[row]] = [vocabulary.cls, *sentences[number], vocabulary.sep]
    masked = np.arange(len(rows)) * ids.shape[1] + rows[:, 1] + 1  # into the flattened ids
    labels = ids.reshape(-1)[masked]
    ids.reshape(-1)[masked] = vocabulary.mask
    device = next(model.parameters()).device
    tensors = [torch.from_numpy(array).to(device) for array in (ids, lengths, masked, labels)]
    is_padded = lengths.min() < lengths.max()
    found = model.features(tensors[0], None, tensors[1] if is_padded else None, tensors[2])
    assert found.vocabulary_input is not None, "a model with a masked-LM head"
    logits = F.linear(found.vocabulary_input, *model.output_projection())
    return -F.cross_entropy(logits.float(), tensors[3], reduction="none")
