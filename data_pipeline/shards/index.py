"""The binary index of one split, and what is computed once from it and cached beside it.

Its files (`INDEX_FILES`) lie beside the shards. They are little-endian, never pickled, and read
through memory maps:

- ``shards.npy``: one `SHARD` record for each ``shard-NNNNNN.tar``, in order;
- ``blocks.npy``: one `BLOCK` record for each block, in shard order;
- ``token_counts.npy``: int64 [vocabulary], the number of occurrences of each id in the split;
- ``sentences.u16``, ``documents.u32``: the concatenated boundaries of all blocks (tokens of each
  sentence, sentences of each document). They allow sequences to be counted without the shards.

A cache file is an ordinary ``.npy`` followed by 32 bytes: the SHA-256 of the index digest, the file
name and the npy bytes. Each writer renames a complete file into place, checksum included, so
processes may race to write it. The checksum reveals a file that is damaged, belongs to another
corpus or was renamed; such a file is computed again.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.durable import while_unchanged
from data_pipeline.errors import DataError
from data_pipeline.shards.blocks import Block
from data_pipeline.shards.manifest import CHUNK, unfinished_name


def map_array(path: Path) -> NDArray[Any]:
    """The one-dimensional array in a file, memory-mapped and read-only.

    Raises DataError, naming the file, if it is missing or holds anything else.
    """
    try:
        array = _mapped(path)
    except FileNotFoundError:
        raise DataError(f"{path}: missing; build the corpus again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # any exception: the header is parsed as a Python literal
        raise DataError(f"{path}: not an array: {' '.join(str(error).split())[:200]}") from None
    if array.ndim != 1:
        raise DataError(f"{path}: has {array.ndim} dimensions instead of one; build again")
    return array


def _mapped(path: Path) -> NDArray[Any]:
    """Map the array in a file as `np.load` does, but open the file once, not three times.

    Where thousands of ranks start, each open is a request to the file system.
    """
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"version {version} of the format")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        if dtype.hasobject:
            raise ValueError("it holds Python objects")
        return np.memmap(file, dtype, "r", file.tell(), shape)


_log = logging.getLogger(__name__)

PATTERN = "sequences-*.npy"
DIGEST_BYTES = 32

# What this process could not write, by path and origin.
_unsaved: dict[tuple[Path, str], NDArray[Any]] = {}


def cached_array(
    path: Path, origin: str, size: int, compute: Callable[[], NDArray[Any]]
) -> NDArray[Any]:
    """The array of `size` numbers at `path`, memory-mapped; computed and kept if not intact.

    `origin` identifies the data that it is computed from.
    """
    kept = kept_array(path, origin, size)
    if kept is not None:
        return kept
    fresh = compute()
    keep_array(path, origin, fresh)
    return fresh


def kept_array(path: Path, origin: str, size: int) -> NDArray[Any] | None:
    """The array of `size` numbers that was kept; None where there is none, or it is damaged."""
    if (path, origin) in _unsaved:
        return _unsaved[path, origin]
    if not path.exists():
        return None
    if is_intact(path, origin):
        array = map_array(path)
        if array.shape == (size,):
            return array
    _log.warning("%s: damaged; computed again", path)
    return None


def keep_array(path: Path, origin: str, array: NDArray[Any]) -> None:
    """Write an array to `path`; where that fails, remember it until this process ends."""
    if not _save(path, array, origin):
        _unsaved[path, origin] = array


def is_intact(path: Path, origin: str) -> bool:
    """Whether a cache file is undamaged and belongs to this name and origin."""
    try:
        return _ends_with_its_digest(path, origin)
    except OSError:
        return False


@while_unchanged
def _ends_with_its_digest(path: Path, origin: str) -> bool:
    digest = _begun(path, origin)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size - DIGEST_BYTES
        while size > 0 and (data := file.read(min(CHUNK, size))):
            digest.update(data)
            size -= len(data)
        return size == 0 and file.read() == digest.digest()


def _begun(path: Path, origin: str) -> hashlib._Hash:
    return hashlib.sha256(f"{origin} {path.name} ".encode())


def _save(path: Path, array: NDArray[Any], origin: str) -> bool:
    """Whether the array could be written."""
    content = io.BytesIO()
    np.save(content, array)
    digest = _begun(path, origin)
    digest.update(content.getbuffer())
    part = unfinished_name(path)
    try:
        part.write_bytes(content.getvalue() + digest.digest())
        part.replace(path)
    except OSError:
        with suppress(OSError):  # a read-only file system has no file to remove
            part.unlink()
        return False
    return True


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
        ("continues", "u1"),  # 1 if the first document began in the block before
    ]
)
SENTENCES, DOCUMENTS = "sentences.u16", "documents.u32"
INDEX_FILES = ("shards.npy", "blocks.npy", "token_counts.npy", SENTENCES, DOCUMENTS)


def shard_name(number: int) -> str:
    """The file name of a shard."""
    return f"shard-{number:06d}.tar"


def shard_number(name: str) -> int:
    """The reverse of `shard_name`."""
    return int(name.removeprefix("shard-").removesuffix(".tar"))


@dataclass(frozen=True)
class Index:
    """The index of one split. Arrays are memory-mapped and read-only."""

    shards: NDArray[np.void]  # [shards] SHARD
    blocks: NDArray[np.void]  # [blocks] BLOCK
    token_counts: NDArray[np.int64]  # [vocabulary]
    sentence_sizes: NDArray[np.uint16]  # [sentences of all blocks] tokens of each
    document_sizes: NDArray[np.uint32]  # [documents of all blocks] sentences of each
    folder: Path

    @property
    def tokens(self) -> int:
        """The number of tokens in the split, without special tokens."""
        return int(self.shards["tokens"].sum())

    @property
    def documents(self) -> int:
        """The number of documents in the split. A document cut between blocks counts once."""
        return int(self.blocks["documents"].sum()) - int(self.blocks["continues"].sum())

    @classmethod
    def open(cls, folder: Path) -> Index:
        """Map the index of the split at `folder`. Raises DataError if it is missing or damaged."""
        names = ("shards", "blocks", "token_counts")
        arrays = [map_array(folder / f"{name}.npy") for name in names]
        if arrays[0].dtype != SHARD or arrays[1].dtype != BLOCK:
            raise DataError(f"{folder}: the index has another format; build the corpus again")
        return cls(
            arrays[0],
            arrays[1],
            arrays[2],
            _map_raw(folder / SENTENCES, "<u2", int(arrays[0]["sentences"].sum())),
            _map_raw(folder / DOCUMENTS, "<u4", int(arrays[0]["documents"].sum())),
            folder,
        )

    def shard_of(self, block: int) -> int:
        """The number of the shard that holds a block."""
        return int(np.searchsorted(self.shards["first_block"], block, side="right")) - 1

    @cached_property
    def _before_shards(self) -> NDArray[np.int64]:
        """[shards, 2] the sentences and documents before each shard; cut documents count again."""
        sizes = np.stack([self.shards["sentences"], self.shards["documents"]], 1).astype(np.int64)
        return np.cumsum(sizes, axis=0) - sizes

    def first_document(self, block: int) -> int:
        """The number of a block's first document in its shard.

        A document that is cut between blocks has the same number in each of them.
        """
        first = int(self.shards["first_block"][self.shard_of(block)])
        before = self.blocks[first : block + 1]
        earlier = before["documents"][:-1].sum(dtype=np.int64)
        return int(earlier - before["continues"][1:].sum(dtype=np.int64))

    def _before(self, block: int) -> tuple[int, int]:
        """The sentences and the documents before a block; cut documents count again."""
        shard = self.shard_of(block)
        earlier = self.blocks[int(self.shards["first_block"][shard]) : block]
        sentences, documents = self._before_shards[shard].tolist()
        return (
            sentences + int(earlier["sentences"].sum(dtype=np.int64)),
            documents + int(earlier["documents"].sum(dtype=np.int64)),
        )

    def boundaries(self, first: int = 0, last: int | None = None) -> Iterator[Block]:
        """Yield the blocks from `first` up to `last`, or to the end; their tokens are zeros.

        They come from the index alone. Raises DataError if the boundaries of a block do not add up
        to its tokens.
        """
        numbers = range(len(self.blocks))[first:last]
        if not numbers:
            return
        sentence, document = self._before(numbers[0])
        for number in numbers:
            record = self.blocks[number]
            next_sentence = sentence + int(record["sentences"])
            next_document = document + int(record["documents"])
            block = Block(
                np.broadcast_to(np.uint16(0), int(record["tokens"])),
                self.sentence_sizes[sentence:next_sentence],
                self.document_sizes[document:next_document],
            )
            if not block.adds_up:
                raise DataError(
                    f"{self.folder}: {SENTENCES} or {DOCUMENTS} is damaged in block {number}; "
                    "restore them from a copy, or build the corpus again"
                )
            yield block
            sentence, document = next_sentence, next_document


def write_index(
    folder: Path,
    shards: Sequence[NDArray[np.void]],
    blocks: Sequence[NDArray[np.void]],
    token_counts: NDArray[np.int64],
) -> None:
    """Write the ``.npy`` files of an index; `shards` and `blocks` are joined."""
    np.save(folder / "shards.npy", np.concatenate([np.zeros(0, SHARD), *shards]))
    np.save(folder / "blocks.npy", np.concatenate([np.zeros(0, BLOCK), *blocks]))
    np.save(folder / "token_counts.npy", token_counts.astype("<i8"))


def _map_raw(path: Path, dtype: str, size: int) -> NDArray[Any]:
    try:
        if path.stat().st_size != size * np.dtype(dtype).itemsize:
            raise DataError(f"{path}: its size does not match the index; build the corpus again")
        return np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
