"""Text with replaced tokens, which a discriminator reads: samples of a generator's predictions.

As in ELECTRA (arXiv 2003.10555), the samples take the place of all masked tokens, and a sample that
happens to be the original token counts as original. They are drawn with the Gumbel-max trick, as in
its code. The noise is a hash of (seed, epoch, sample id, position, token), so a sample depends on
neither the number of ranks nor on how often the job restarted.
"""

from dataclasses import replace

import torch
from torch import Tensor

from data_pipeline import MASKED, NO_LABEL
from data_pipeline.hashing import MaskChoice, array_keys, scalar_key
from data_pipeline.masking.torch_masker import random_uint32
from trainer.batches import MicroBatch, MicroTarget
from trainer.vocabulary_projection import Distribution, blocks, chunks

REPLACED = "rtd"  # the target, and the head that predicts it


def with_view(
    batch: MicroBatch, generator: str, predictions: Distribution, seed: int
) -> MicroBatch:
    """The batch with a view, under the name of the `generator`, of its `replaced` tokens."""
    view = replaced(batch, predictions, seed)
    return replace(batch, views={**batch.views, generator: view})


@torch.no_grad()
def replaced(batch: MicroBatch, predictions: Distribution, seed: int) -> MicroBatch:
    """The batch with samples of a generator's `predictions` in place of its masked tokens.

    `predictions` are at the masked positions. The labels of the target `REPLACED` are int64
    [B * L], one for each position: 1 where the token differs from the original, 0 where it does
    not, -100 at padding and in rows without labels.
    """
    masked = batch.targets[MASKED]
    assert masked.positions is not None
    is_used = masked.labels != NO_LABEL
    sampled = _samples(batch, masked.positions, predictions, seed)
    ids = batch.input_ids.flatten()
    # Unused slots hold the first column; they write its token back.
    shown = torch.where(is_used, sampled, ids[masked.positions])
    is_new = (is_used & (sampled != masked.labels)).long()
    is_labelled = is_used.view(len(batch.input_ids), -1).any(dim=1, keepdim=True)
    labels = torch.zeros_like(ids).scatter(0, masked.positions, is_new)
    labels = labels.masked_fill(~(batch.attention_mask & is_labelled).flatten(), NO_LABEL)
    return replace(
        batch,
        input_ids=ids.scatter(0, masked.positions, shown).view_as(batch.input_ids),
        targets={**batch.targets, REPLACED: MicroTarget(labels)},
    )


def _samples(batch: MicroBatch, positions: Tensor, predictions: Distribution, seed: int) -> Tensor:
    """A token for each of these flat positions [P] of B * L: int64 [P]."""
    assert batch.epochs is not None
    assert batch.sample_ids is not None
    length = batch.input_ids.shape[1]
    row_keys = array_keys(scalar_key(seed, MaskChoice.REPLACED), batch.epochs, batch.sample_ids)
    by_row = torch.from_numpy(row_keys.view("int64")).to(positions.device, non_blocking=True)
    keys = by_row[positions // length]
    columns = (positions % length)[:, None]  # [P, 1]
    sampled = torch.empty_like(positions)
    _, vocabulary = predictions.shape
    tokens = torch.arange(vocabulary, device=positions.device)
    for chunk in chunks(len(positions), vocabulary, positions.device):
        for rows in blocks(chunk, tokens):
            words = random_uint32(keys[rows], columns[rows] * vocabulary + tokens)
            noisy = predictions.log_at(rows, 1.0).sub_(_log_exponential(words))
            sampled[rows] = noisy.argmax(dim=-1)
    return sampled


def _log_exponential(words: Tensor) -> Tensor:
    """Logarithms of exponential variates, float32, from random 32-bit words; minus Gumbel's."""
    uniform = (words.double() + 0.5).mul_(2.0**-32).float()
    # The smallest variates win, and near 0 a float is fine enough for 32 bits.
    return uniform.neg_().log1p_().neg_().log_()
