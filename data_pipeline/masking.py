"""Masking: which positions of which sequence are predicted in which epoch, and what they show.

Every decision is a 32-bit word hashed from (seed, epoch, sample id, position). The positions with
the smallest words are chosen, exactly ``round(rate * maskable positions)`` of them (half to even);
a tie is decided by the position. Special tokens and padding are never chosen, and a random
replacement is never a special token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.config import MaskingConfig
from data_pipeline.hashing import array_keys, scalar_key, words
from data_pipeline.tokenization import Vocabulary

CHOICE, ACTION, REPLACEMENT = 11, 12, 13  # what a hash decides; part of its key
NEVER = np.uint32(0xFFFFFFFF)
NO_LABEL = -100


@dataclass(frozen=True)
class Masked:
    """Sequences after masking, and what was chosen."""

    input_ids: NDArray[np.int64]  # [R, L]
    positions: NDArray[np.int64]  # [R, M] columns, ascending; spare slots 0
    labels: NDArray[np.int64]  # [R, M] the ids that were there; spare slots -100


def capacity(length: int, config: MaskingConfig) -> int:
    """M, the most positions that a sequence of `length` tokens can have chosen."""
    return int(np.rint(config.rate * (length - 2)))


def mask_tokens(
    input_ids: NDArray[np.int64],
    epochs: NDArray[np.int64],
    sample_ids: NDArray[np.int64],
    seed: int,
    config: MaskingConfig,
    vocabulary: Vocabulary,
) -> Masked:
    """Choose and replace tokens of `input_ids` [R, L]; `epochs` and `sample_ids` are [R]."""
    maskable = ~vocabulary.is_special[input_ids]
    budget = np.rint(config.rate * maskable.sum(1)).astype(np.int64)
    keys = array_keys(scalar_key(seed, CHOICE), epochs, sample_ids)
    positions, used = _smallest(keys, maskable, budget, capacity(input_ids.shape[1], config))
    return _replace(input_ids, positions, used, keys, config, vocabulary)


def _smallest(
    keys: NDArray[np.uint64],
    maskable: NDArray[np.bool_],
    budget: NDArray[np.int64],
    slots: int,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The `budget` maskable columns with the smallest words: positions [R, M], used [R, M]."""
    columns = np.arange(maskable.shape[1], dtype=np.uint32)
    # The low bits of a word give way to the column: sorting then also tells where, without ties.
    column_bits = np.uint32((1 << int(maskable.shape[1] - 1).bit_length()) - 1)
    word = words(keys, columns)
    word &= ~column_bits
    word |= columns
    word[~maskable] = NEVER
    word.sort(axis=1)
    used = np.arange(slots) < budget[:, None]
    positions = np.where(used, word[:, :slots] & column_bits, np.uint32(maskable.shape[1]))
    positions.sort(axis=1)
    return np.where(used, positions, 0).astype(np.int64), used


def _replace(
    input_ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    used: NDArray[np.bool_],
    keys: NDArray[np.uint64],
    config: MaskingConfig,
    vocabulary: Vocabulary,
) -> Masked:
    """Put mask and random tokens at the chosen positions; the labels are what was there."""
    original = np.take_along_axis(input_ids, positions, axis=1)
    action = words(array_keys(ACTION, keys.view(np.int64)), positions).astype(np.int64)
    draw = words(array_keys(REPLACEMENT, keys.view(np.int64)), positions).astype(np.int64)
    random_ids = vocabulary.ordinary[(draw * len(vocabulary.ordinary)) >> 32]
    to_mask = round(config.mask_share * 2**32)
    to_random = round((config.mask_share + config.random_share) * 2**32)
    shown = np.where(action < to_random, random_ids, original)
    shown = np.where(action < to_mask, vocabulary.mask, shown)
    # Spare slots come last and name column 0: they write back what is there.
    masked_ids = input_ids.copy()
    np.put_along_axis(masked_ids, positions, np.where(used, shown, original), axis=1)
    return Masked(masked_ids, positions, np.where(used, original, NO_LABEL))
