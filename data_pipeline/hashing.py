"""Counter-based random numbers: each random decision is a hash of what it decides about.

There is no generator state, so any rank can repeat any decision, at any time and in any order.
`scalar_key` and `array_keys` mix integers into 64-bit keys with SplitMix64. Per-position decisions
use 32-bit numbers (`random_uint32`), which numpy and torch (`torch_masker`) compute bit for bit
alike.

A key holds a tag, which says what is decided, so that two decisions about the same thing differ.
All tags are below. Each class is for keys of one form, and has each number once. Keys of other
forms may use the same number. A changed number changes what every run reads.
"""

from enum import IntEnum, unique

import numpy as np
from numpy.typing import NDArray

MASK64 = (1 << 64) - 1
GOLDEN64 = 0x9E3779B97F4A7C15
MIX64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
GOLDEN32 = 0x9E3779B9
MIX32 = (0x85EBCA6B, 0xC2B2AE35)  # the finaliser of MurmurHash3


@unique
class TextDraw(IntEnum):
    """The order of a text corpus: seed, epoch, tag, and for all but SHARDS which one."""

    SHARDS = 1  # the order of the shards
    BLOCKS = 2  # the order of the blocks inside a shard
    SEQUENCES = 3  # the order of the sequences inside a block
    PAIRS = 4  # the pairs of a pool; `PairDraw` continues this key


@unique
class ExampleDraw(IntEnum):
    """The order of a task's examples: seed, epoch, tag, and for two of them which pool.

    BLOCKS has the number of `TextDraw.PAIRS`: a job reads either text or examples.
    """

    BLOCKS = 4  # the order of the blocks, which are then cut into pools
    EXAMPLES = 5  # the order of the examples of a pool
    BATCHES = 6  # the order of the batches of a window of a pool
    TASKS = 7  # which of several tasks each step is of


@unique
class MaskChoice(IntEnum):
    """Which tokens are masked, or replaced: seed, tag, epoch, number of the sequence or example."""

    TEXT = 11  # tokens, words or n-grams of a packed sequence; `MaskDraw` mixes in this key
    VIEW = 14  # tokens of an example's second text
    REPLACED = 16  # the tokens that a generator samples for the masked positions of a sequence


@unique
class MaskDraw(IntEnum):
    """A detail of a sequence's masks: tag, and the sequence's key (`MaskChoice.TEXT`).

    NGRAM has the number of `MaskChoice.VIEW`, but begins the key. There it follows a seed.
    """

    ACTION = 12  # whether a chosen token becomes a mask, a random token, or stays
    REPLACEMENT = 13  # which random token it becomes
    NGRAM = 14  # how many words are masked together
    OTHER = 17  # which random token a token of another tokenizer becomes


@unique
class TeacherDraw(IntEnum):
    """Draws from a teacher's predictions: seed, tag, epoch, sequence or example; position."""

    TOKENS = 15  # the tokens that are stored in place of all probabilities


@unique
class PackingDraw(IntEnum):
    """How a block is packed: tag, and the sizes of the block."""

    SHORT = 21  # which sequences aim at a smaller length


@unique
class PairDraw(IntEnum):
    """A detail of a pool's pairs: the pool's key (`TextDraw.PAIRS`), tag, number of the unit."""

    SPLIT = 31  # where a unit is split in two
    LABEL = 32  # whether a couple exchanges its second segments, or a pair is swapped
    TIE_BREAK = 33  # the order of units whose second segments are equally long


@unique
class HeldOutDraw(IntEnum):
    """A part of a task's file: tag, which stretch of its examples."""

    EXAMPLE = 1  # the example of a stretch that is held out


@unique
class PerturbationDraw(IntEnum):
    """``tandem data perturb``: seed, which copy of which text, tag.

    It shares its numbers with `ReplacementDraw`, which belongs to another command.
    """

    CHANGED = 1  # whether a word is masked, replaced or kept
    CHOSEN = 2  # by which word it is replaced
    CUT = 3  # whether, and where, an n-gram is cut out


@unique
class ReplacementDraw(IntEnum):
    """``tandem data augment``: seed, which text, tag."""

    REPLACED = 1  # whether a word of a copy is replaced
    CHOSEN = 2  # by which of its candidates


@unique
class LineDraw(IntEnum):
    """``tandem tokenizer train``: tag, which stretch of the text's lines."""

    SAMPLE = 1  # the line of a stretch that is used


@unique
class DuplicateDraw(IntEnum):
    """``tandem data build --near-duplicates``: tag, number of the band, its hash values."""

    BAND = 1  # which signatures are compared


def scalar_key(*parts: int) -> int:
    """A 64-bit key from integers below 2**64. Their order matters."""
    key = 0
    for part in parts:
        key = _mix64(((key ^ (part & MASK64)) + GOLDEN64) & MASK64)
    return key


def array_keys(key: int | NDArray[np.uint64], *parts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64-bit keys for arrays of integers: `scalar_key`, element-wise, continued from `key`.

    The arguments are broadcast against each other. At least one of them must have a dimension.
    """
    shape = np.broadcast_shapes(np.shape(key), *(part.shape for part in parts))
    state = np.full(shape, key, np.uint64)
    for part in parts:
        state ^= part.astype(np.uint64)
        state += GOLDEN64
        state ^= state >> np.uint64(30)
        state *= MIX64[0]
        state ^= state >> np.uint64(27)
        state *= MIX64[1]
        state ^= state >> np.uint64(31)
    return state


def random_uint32(keys: NDArray[np.uint64], positions: NDArray[np.integer]) -> NDArray[np.uint32]:
    """32 random bits for each (key, position).

    `keys` [R] and `positions` [P] or [R, P] give [R, P]. The low half of the key enters before the
    first mixing and the high half after it, so all 64 bits count.
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
