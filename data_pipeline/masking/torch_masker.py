"""Token masks on the training device, bit for bit those of `data_pipeline.masking.masker`.

torch lacks unsigned arithmetic on most devices. So the 64-bit hash runs in wrapping int64
arithmetic with logical shifts, and the 32-bit hash in the low halves of int64.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from data_pipeline import hashing
from data_pipeline.masking.config import MaskingConfig
from data_pipeline.masking.masker import NO_LABEL, UNMASKABLE
from data_pipeline.tokenization.tokenizer import Vocabulary

MASK32 = 0xFFFFFFFF


@dataclass(frozen=True)
class TorchMasked:
    """`Masked` as int64 tensors."""

    input_ids: Tensor  # [R, L]
    positions: Tensor  # [R, M]
    labels: Tensor  # [R, M]


class TorchMasker:
    """Masks tokens, without smoothing, on the device of its inputs; any sequence length."""

    def __init__(self, seed: int, config: MaskingConfig, vocabulary: Vocabulary) -> None:
        self._config, self._vocabulary = config, vocabulary
        self._key = hashing.scalar_key(seed, hashing.MaskChoice.TEXT)
        self._special = torch.from_numpy(vocabulary.is_special.copy())
        self._ordinary = torch.from_numpy(vocabulary.ordinary.copy())

    def __call__(
        self, input_ids: Tensor, epochs: Tensor, sample_ids: Tensor, budget: Tensor, slots: int
    ) -> TorchMasked:
        """Mask `budget` [R] tokens of `input_ids` [R, L], at most M = `slots` in a row.

        `epochs` and `sample_ids` are [R]. Does not synchronise with the device.
        """
        device = input_ids.device
        if self._special.device != device:
            self._special, self._ordinary = self._special.to(device), self._ordinary.to(device)
        if self._config.copies:
            epochs = epochs % self._config.copies
        keys = _array_keys(self._key, epochs, sample_ids)
        positions, used = _smallest(keys, ~self._special[input_ids], budget, slots)
        return self._replace(input_ids, positions, used, keys)

    def _replace(
        self, input_ids: Tensor, positions: Tensor, used: Tensor, keys: Tensor
    ) -> TorchMasked:
        original = input_ids.gather(1, positions)
        action = random_uint32(_array_keys(hashing.MaskDraw.ACTION, keys), positions)
        draw = random_uint32(_array_keys(hashing.MaskDraw.REPLACEMENT, keys), positions)
        random_ids = self._ordinary[(draw * len(self._ordinary)) >> 32]
        to_mask, to_random = self._config.thresholds
        shown = torch.where(action < to_random, random_ids, original)
        shown = torch.where(action < to_mask, self._vocabulary.mask, shown)
        # Unused slots hold column 0; they write its [CLS] back.
        masked_ids = input_ids.scatter(1, positions, torch.where(used, shown, original))
        return TorchMasked(masked_ids, positions, torch.where(used, original, NO_LABEL))


def _smallest(keys: Tensor, maskable: Tensor, budget: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    length = maskable.shape[1]
    columns = torch.arange(length, device=keys.device)
    column_bits = (1 << (length - 1).bit_length()) - 1
    word = (random_uint32(keys, columns[None]) & ~column_bits) | columns
    word = word.masked_fill(~maskable, int(UNMASKABLE)).sort(1).values
    used = torch.arange(slots, device=keys.device) < budget[:, None]
    positions = torch.where(used, word[:, :slots] & column_bits, length).sort(1).values
    return torch.where(used, positions, 0), used


def _array_keys(key: int, *parts: Tensor) -> Tensor:
    state = torch.full_like(parts[0], _signed(key))
    for part in parts:
        state = (state ^ part) + _signed(hashing.GOLDEN64)
        state = (state ^ _logical_shift(state, 30)) * _signed(hashing.MIX64[0])
        state = (state ^ _logical_shift(state, 27)) * _signed(hashing.MIX64[1])
        state = state ^ _logical_shift(state, 31)
    return state


def random_uint32(keys: Tensor, positions: Tensor) -> Tensor:
    """32 random bits for each (key, position), as `data_pipeline.hashing.random_uint32`.

    `keys` int64 [R] and `positions` [P] or [R, P] give [R, P].
    """
    low, high = (keys & MASK32)[:, None], _logical_shift(keys, 32)[:, None]
    word = (positions * hashing.GOLDEN32 + low) & MASK32
    return _mix32(_mix32(word) ^ high)


def _mix32(word: Tensor) -> Tensor:
    word = ((word ^ (word >> 16)) * hashing.MIX32[0]) & MASK32
    word = ((word ^ (word >> 13)) * hashing.MIX32[1]) & MASK32
    return word ^ (word >> 16)


def _logical_shift(state: Tensor, bits: int) -> Tensor:
    """A logical right shift."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    value &= hashing.MASK64
    return value - (1 << 64) if value >> 63 else value
