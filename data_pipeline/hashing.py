"""Counter-based hashing: every random decision is a pure function of what it is about.

There is no generator state, so any decision can be made again at any time, in any order and on
any rank. Scalars (`scalar_key`) and arrays (`array_keys`) of 64 bits are mixed with SplitMix64;
per-position decisions use 32-bit words (`words`), which numpy and torch compute alike
(see `torch_masking`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MASK64 = (1 << 64) - 1
GOLDEN64 = 0x9E3779B97F4A7C15
MIX64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
GOLDEN32 = 0x9E3779B9
MIX32 = (0x85EBCA6B, 0xC2B2AE35)  # the finaliser of MurmurHash3


def scalar_key(*parts: int) -> int:
    """One 64-bit key from integers of any size below 2**64; order matters."""
    key = 0
    for part in parts:
        key = _mix64(((key ^ (part & MASK64)) + GOLDEN64) & MASK64)
    return key


def array_keys(key: int | NDArray[np.uint64], *parts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64-bit keys for arrays of integers: `scalar_key` continued from `key`, element-wise.

    What is given is broadcast, and has at least one dimension together.
    """
    shape = np.broadcast_shapes(np.shape(key), *(part.shape for part in parts))
    state = np.full(shape, key, np.uint64)
    for part in parts:
        state ^= part.astype(np.uint64)
        state += np.uint64(GOLDEN64)
        state ^= state >> np.uint64(30)
        state *= np.uint64(MIX64[0])
        state ^= state >> np.uint64(27)
        state *= np.uint64(MIX64[1])
        state ^= state >> np.uint64(31)
    return state


def words(keys: NDArray[np.uint64], positions: NDArray[np.integer]) -> NDArray[np.uint32]:
    """32 random bits for each (key, position).

    `keys` [R] and `positions` [P] or [R, P] give [R, P]. Both halves of the key enter, before
    and after the first mixing, so all 64 bits count.
    """
    low = keys.astype(np.uint32)[:, None]
    high = (keys >> np.uint64(32)).astype(np.uint32)[:, None]
    word = positions.astype(np.uint32) * np.uint32(GOLDEN32) + low
    _mix32(word)
    word ^= high
    _mix32(word)
    return word


def permutation(key: int, size: int) -> NDArray[np.int64]:
    """A pseudo-random permutation of range(size)."""
    return np.argsort(array_keys(key, np.arange(size)), kind="stable")


def _mix64(value: int) -> int:
    value = ((value ^ (value >> 30)) * MIX64[0]) & MASK64
    value = ((value ^ (value >> 27)) * MIX64[1]) & MASK64
    return value ^ (value >> 31)


def _mix32(word: NDArray[np.uint32]) -> None:
    word ^= word >> np.uint32(16)
    word *= np.uint32(MIX32[0])
    word ^= word >> np.uint32(13)
    word *= np.uint32(MIX32[1])
    word ^= word >> np.uint32(16)
