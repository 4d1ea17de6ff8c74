"""Masking: which positions of which sequence are predicted in which epoch, and what they show.

Every decision is a 32-bit word hashed from (seed, epoch, sample id, position). For token masks
the positions with the smallest words are chosen, exactly ``round(rate * ordinary tokens)`` of
them (half to even); a tie is decided by the position. Special tokens and padding are never
chosen, and a random replacement is never a special token. `torch_masking` makes the same token
masks on any device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.config import MaskingConfig
from data_pipeline.hashing import array_keys, scalar_key, words
from data_pipeline.masking.words import choose_words
from data_pipeline.tokenization.tokenizer import Vocabulary

CHOICE, ACTION, REPLACEMENT = 11, 12, 13  # what a hash decides; part of its key
PURPOSES = np.array([[ACTION], [REPLACEMENT]], np.uint64)
NEVER = np.uint32(0xFFFFFFFF)
NO_LABEL = -100


@dataclass(frozen=True)
class Masked:
    """Sequences after masking, and what was chosen."""

    input_ids: NDArray[np.int64]  # [R, L]
    positions: NDArray[np.int64]  # [R, M] columns, ascending; spare slots 0
    labels: NDArray[np.int64]  # [R, M] the ids that were there; spare slots -100
    to_mask: NDArray[np.int64] | None = None  # [R] how many are still to be chosen; None: done


class Masker:
    """Masks sequences of one length."""

    def __init__(
        self,
        seed: int,
        config: MaskingConfig,
        vocabulary: Vocabulary,
        length: int,
        token_counts: NDArray[np.int64],
        word_starts: NDArray[np.bool_],
    ) -> None:
        """`token_counts` and `word_starts` [vocab_size] are for smoothing and for words."""
        self._config, self._vocabulary, self._word_starts = config, vocabulary, word_starts
        self._key = scalar_key(seed, CHOICE)
        self._is_ordinary = ~vocabulary.is_special
        self._rarity = (np.maximum(token_counts, 1) ** config.smoothing).astype(np.float64)
        self.capacity = int(np.rint(config.highest_rate * (length - 2)))

    def __call__(
        self,
        input_ids: NDArray[np.int64],
        epochs: NDArray[np.int64],
        sample_ids: NDArray[np.int64],
        step: int = 0,
    ) -> Masked:
        """Choose and replace tokens of `input_ids` [R, L]; `epochs` and `sample_ids` are [R]."""
        if self._config.copies:
            epochs = epochs % self._config.copies
        keys = array_keys(self._key, epochs, sample_ids)
        maskable = self._is_ordinary[input_ids]
        budget = self._budget(maskable, step)
        positions, used = self._choose(keys, input_ids, maskable, budget)
        return _replace(input_ids, positions, used, keys, self._config, self._vocabulary)

    def leave(self, input_ids: NDArray[np.int64], step: int = 0) -> Masked:
        """`input_ids` [R, L] as they are; only how much there is to be chosen, of tokens."""
        slots = np.zeros((len(input_ids), self.capacity), np.int64)
        budget = self._budget(self._is_ordinary[input_ids], step)
        return Masked(input_ids, slots, np.full_like(slots, NO_LABEL), budget)

    def _budget(self, maskable: NDArray[np.bool_], step: int) -> NDArray[np.int64]:
        return np.rint(self._config.rate_at(step) * maskable.sum(1)).astype(np.int64)

    def _choose(
        self,
        keys: NDArray[np.uint64],
        input_ids: NDArray[np.int64],
        maskable: NDArray[np.bool_],
        budget: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The chosen columns, ascending, spare slots 0: [R, M], and which slots are used."""
        if self._config.unit == "token":
            columns = np.arange(input_ids.shape[1], dtype=np.uint32)
            draws = words(keys, columns)
            if self._config.smoothing:
                draws = self._smoothed(draws, input_ids)
            return smallest(draws, maskable, budget, self.capacity)
        starts = maskable & (self._word_starts[input_ids] | ~np.roll(maskable, 1, axis=1))
        longest = self._config.max_ngram if self._config.unit == "ngram" else 1
        row, column = choose_words(keys, starts, maskable, budget, longest)
        return _slots(row, column, len(input_ids), self.capacity)

    def _smoothed(
        self, draws: NDArray[np.uint32], input_ids: NDArray[np.int64]
    ) -> NDArray[np.uint32]:
        """Draws of which the smallest come without replacement, weighted by count**-smoothing.

        The smallest of exponential variables with the weights as rates are such a draw. The bits
        of positive float32 numbers are in the order of the numbers.
        """
        uniform = (draws + 0.5) / 2.0**32
        waiting = -np.log(uniform) * self._rarity[input_ids]
        return waiting.astype(np.float32).view(np.uint32)


def smallest(
    draws: NDArray[np.uint32],
    maskable: NDArray[np.bool_],
    budget: NDArray[np.int64],
    slots: int,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The `budget` maskable columns with the smallest draws: positions [R, M], used [R, M]."""
    columns = np.arange(maskable.shape[1], dtype=np.uint32)
    # The low bits of a draw give way to the column: sorting then also tells where, without ties.
    column_bits = np.uint32((1 << int(maskable.shape[1] - 1).bit_length()) - 1)
    word = (draws & ~column_bits) | columns
    word[~maskable] = NEVER
    word.sort(axis=1)
    used = np.arange(slots) < budget[:, None]
    positions = np.where(used, word[:, :slots] & column_bits, np.uint32(maskable.shape[1]))
    positions.sort(axis=1)
    return np.where(used, positions, 0).astype(np.int64), used


def _slots(
    row: NDArray[np.int64], column: NDArray[np.int64], rows: int, slots: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Chosen tokens, in reading order, as columns, spare slots 0: [R, M]; and which are used."""
    used = np.arange(slots) < np.bincount(row, minlength=rows)[:, None]
    positions = np.zeros((rows, slots), np.int64)
    positions[used] = column
    return positions, used


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
    both = array_keys(PURPOSES, keys.view(np.int64)).ravel()  # [2 R]
    drawn = words(both, np.concatenate([positions, positions])).astype(np.int64)
    action, draw = drawn[: len(keys)], drawn[len(keys) :]
    random_ids = vocabulary.ordinary[(draw * len(vocabulary.ordinary)) >> 32]
    to_mask = round(config.mask_fraction * 2**32)
    to_random = round((config.mask_fraction + config.random_fraction) * 2**32)
    shown = np.where(action < to_random, random_ids, original)
    shown = np.where(action < to_mask, vocabulary.mask, shown)
    # Spare slots come last and name column 0: they write back what is there.
    masked_ids = input_ids.copy()
    np.put_along_axis(masked_ids, positions, np.where(used, shown, original), axis=1)
    return Masked(masked_ids, positions, np.where(used, original, NO_LABEL))
