"""The binary index of one split: what each shard and each block holds and where.

Three ``.npy`` files beside the shards, read through memory maps, little-endian, never pickled:

- ``shards.npy``: one `SHARD` record for each ``shard-NNNNNN.tar``, in order;
- ``blocks.npy``: one `BLOCK` record for each block, in shard order;
- ``token_counts.npy``: int64 [vocabulary], how often each id occurs in the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError

SHARD = np.dtype(
    [
        ("bytes", "<u8"),
        ("sha256", "u1", (32,)),
        ("first_block", "<u8"),
        ("blocks", "<u4"),
        ("documents", "<u8"),
        ("sentences", "<u8"),
        ("tokens", "<u8"),
    ]
)
BLOCK = np.dtype(
    [
        ("offset", "<u8"),  # of its first tar header in the shard
        ("bytes", "<u4"),  # headers and padding included
        ("crc32", "<u4"),  # of those bytes
        ("documents", "<u4"),
        ("sentences", "<u4"),
        ("tokens", "<u4"),
    ]
)


def shard_name(number: int) -> str:
    """The file name of a shard."""
    return f"shard-{number:06d}.tar"


@dataclass(frozen=True)
class Index:
    """The index of one split. Arrays are memory-mapped and read-only."""

    shards: NDArray[np.void]  # [shards] SHARD
    blocks: NDArray[np.void]  # [blocks] BLOCK
    token_counts: NDArray[np.int64]  # [vocabulary]

    @property
    def tokens(self) -> int:
        """Tokens of the split, special tokens not counted."""
        return int(self.shards["tokens"].sum())

    @property
    def documents(self) -> int:
        """Documents of the split."""
        return int(self.shards["documents"].sum())

    @classmethod
    def open(cls, folder: Path) -> Index:
        """Map the index of the split at `folder`. Raises DataError when missing or damaged."""
        arrays = [_map(folder / f"{name}.npy") for name in ("shards", "blocks", "token_counts")]
        index = cls(*arrays)
        if index.shards.dtype != SHARD or index.blocks.dtype != BLOCK:
            raise DataError(f"{folder}: the index is of another format; build the corpus again")
        return index

    def shard_of(self, block: int) -> int:
        """The number of the shard that holds a block."""
        return int(np.searchsorted(self.shards["first_block"], block, side="right")) - 1


def write_index(
    folder: Path,
    shards: Sequence[NDArray[np.void]],
    blocks: Sequence[NDArray[np.void]],
    token_counts: NDArray[np.int64],
) -> None:
    """Write the index files of a split; `shards` and `blocks` are arrays to be joined."""
    np.save(folder / "shards.npy", np.concatenate([np.zeros(0, SHARD), *shards]))
    np.save(folder / "blocks.npy", np.concatenate([np.zeros(0, BLOCK), *blocks]))
    np.save(folder / "token_counts.npy", token_counts.astype("<i8"))


def _map(path: Path) -> NDArray:
    try:
        # A memory map of nothing is refused by the operating system.
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        return array
    except FileNotFoundError:
        raise DataError(f"{path}: missing; build the corpus again") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
