"""Masking: which positions of a sequence are predicted in an epoch, and what the model sees there.

Every decision is a 32-bit random number hashed from (seed, epoch, sample id, position). For token
masks the ``round(rate * ordinary tokens)`` positions with the smallest numbers are chosen (half to
even); the position breaks ties. Special tokens and padding are never chosen, and a random
replacement is never a special token. `torch_masker` makes the same token masks on any device.

Where the unit is the next token, nothing is masked: each position before an ordinary token or [SEP]
predicts it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.hashing import MaskChoice, MaskDraw, array_keys, random_uint32, scalar_key
from data_pipeline.masking.config import MaskingConfig
from data_pipeline.masking.words import choose_words
from data_pipeline.tokenization.tokenizer import Vocabulary

UNMASKABLE = np.uint32(0xFFFFFFFF)
NO_LABEL = -100


@dataclass(frozen=True)
class Masked:
    """Sequences after masking, with the positions that predict and their labels."""

    input_ids: NDArray[np.int64]  # [R, L]
    positions: NDArray[np.int64]  # [R, M] columns, ascending; 0 in unused slots
    labels: NDArray[np.int64]  # [R, M] the original or the next ids; -100 in unused slots
    to_mask: NDArray[np.int64] | None = None  # [R] positions still to be chosen; None: masked


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
        """`token_counts` [vocab_size] serves smoothing, `word_starts` [vocab_size] word masks."""
        self._config, self._vocabulary, self._word_starts = config, vocabulary, word_starts
        self._key = scalar_key(seed, MaskChoice.TEXT)
        self._is_ordinary = ~vocabulary.is_special
        self._rarity = (np.maximum(token_counts, 1) ** config.smoothing).astype(np.float64)
        self.capacity = config.slots(length)

    def __call__(
        self,
        input_ids: NDArray[np.int64],
        epochs: NDArray[np.int64],
        sample_ids: NDArray[np.int64],
        step: int = 0,
    ) -> Masked:
        """Mask `input_ids` [R, L]; `epochs` and `sample_ids` are [R]."""
        if self._config.is_causal:
            return self._next_tokens(input_ids)
        keys = self.keys(epochs, sample_ids)
        maskable = self._is_ordinary[input_ids]
        budget = self._budget(maskable, step)
        positions, used = self._choose(keys, input_ids, maskable, budget)
        return _replace(input_ids, positions, used, keys, self._config, self._vocabulary)

    def keys(self, epochs: NDArray[np.int64], sample_ids: NDArray[np.int64]) -> NDArray[np.uint64]:
        """The keys of all draws for these sequences, [R]."""
        if self._config.copies:
            epochs = epochs % self._config.copies
        return array_keys(self._key, epochs, sample_ids)

    def _next_tokens(self, input_ids: NDArray[np.int64]) -> Masked:
        """Ordinary tokens and [SEP] as the labels of the positions before them."""
        following = input_ids[:, 1:]
        is_label = self._is_ordinary[following] | (following == self._vocabulary.sep)
        row, column = np.nonzero(is_label)
        positions, used = _slots(row, column, len(input_ids), self.capacity)
        labels = np.take_along_axis(following, positions, axis=1)
        return Masked(input_ids, positions, np.where(used, labels, NO_LABEL))

    def defer(self, input_ids: NDArray[np.int64], step: int = 0) -> Masked:
        """Leave `input_ids` [R, L] unmasked, with `to_mask` set for `TorchMasker`."""
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
        """The chosen columns [R, M], ascending, 0 in unused slots, and the used slots [R, M]."""
        if self._config.unit == "token":
            columns = np.arange(input_ids.shape[1], dtype=np.uint32)
            draws = random_uint32(keys, columns)
            if self._config.smoothing:
                draws = self._smoothed(draws, input_ids)
            return smallest(draws, maskable, budget, self.capacity)
        starts = self._word_starts[input_ids]
        starts[:, 1:] |= ~maskable[:, :-1]  # a word begins after whatever is not maskable
        starts &= maskable
        longest = self._config.max_ngram if self._config.unit == "ngram" else 1
        row, column = choose_words(keys, starts, maskable, budget, longest)
        return _slots(row, column, len(input_ids), self.capacity)

    def _smoothed(
        self, draws: NDArray[np.uint32], input_ids: NDArray[np.int64]
    ) -> NDArray[np.uint32]:
        """Turn uniform draws into draws weighted by ``count**-smoothing``.

        The smallest of exponential variables, with the weights as rates, are a weighted sample
        without replacement. Positive float32 numbers and their bit patterns have the same order.
        """
        uniform = (draws + 0.5) / 2.0**32
        waiting = -np.log(uniform) * self._rarity[input_ids]
        return waiting.astype(np.float32).view(np.uint32)


def smallest(
    draws: NDArray[np.uint32], maskable: NDArray[np.bool_], budget: NDArray[np.int64], slots: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The `budget` maskable columns with the smallest draws: positions [R, M], used [R, M]."""
    columns = np.arange(maskable.shape[1], dtype=np.uint32)
    # The column replaces the low bits of a draw, so that sorting also yields it and no ties occur.
    column_bits = np.uint32((1 << int(maskable.shape[1] - 1).bit_length()) - 1)
    word = (draws & ~column_bits) | columns
    word[~maskable] = UNMASKABLE
    word.sort(axis=1)
    used = np.arange(slots) < budget[:, None]
    positions = np.where(used, word[:, :slots] & column_bits, np.uint32(maskable.shape[1]))
    positions.sort(axis=1)
    return np.where(used, positions, 0).astype(np.int64), used


def _slots(
    row: NDArray[np.int64], column: NDArray[np.int64], rows: int, slots: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Chosen tokens as columns [R, M], 0 in unused slots, and the used slots [R, M].

    `row` and `column` are in reading order.
    """
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
    """Put mask and random tokens at the chosen positions; the labels are the original ids."""
    place = positions + np.arange(0, input_ids.size, input_ids.shape[1])[:, None]
    original = input_ids.take(place)
    purposes = np.array([[MaskDraw.ACTION], [MaskDraw.REPLACEMENT]], np.uint64)
    both = array_keys(purposes, keys.view(np.int64)).ravel()  # [2 R]
    drawn = random_uint32(both, np.concatenate([positions, positions])).astype(np.int64)
    action, draw = drawn[: len(keys)], drawn[len(keys) :]
    random_ids = vocabulary.ordinary.take((draw * len(vocabulary.ordinary)) >> 32)
    to_mask, to_random = config.thresholds
    shown = np.where(action < to_random, random_ids, original)
    shown = np.where(action < to_mask, vocabulary.mask, shown)
    # Unused slots come last and hold column 0; they write its own id back.
    masked_ids = input_ids.copy()
    masked_ids.put(place, np.where(used, shown, original))
    return Masked(masked_ids, positions, np.where(used, original, NO_LABEL))
