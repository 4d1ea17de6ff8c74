"""Writing the shards of one split: documents in, tar files and an index out.

A shard is written under a hidden name. It is renamed when it is complete and synced to disk, so a
visible shard is always complete. A later process can resume from `SplitWriter.state`. The state
says how many bytes of each file are valid; `restore` verifies them and discards the rest.
"""

import errno
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.durable import fsync
from data_pipeline.errors import DataError
from data_pipeline.shards import index
from data_pipeline.shards.blocks import (
    BLOCK_BYTES,
    END_OF_TAR,
    SHARD_MB,
    Block,
    encode_block,
    joined,
    token_dtype,
)
from data_pipeline.shards.manifest import sha256

CHUNK = 1 << 22


@dataclass
class CommittedPrefix:
    """The valid prefix of a file: its size and CRC-32. Bytes after it are discarded."""

    size: int = 0
    crc32: int = 0

    def append(self, path: Path, data: bytes) -> None:
        """Write `data` after the prefix and extend the prefix by it."""
        with open(path, "ab") as file:
            file.truncate(self.size)
            file.write(data)
        self.size += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)

    def verify(self, path: Path, advice: str) -> None:
        """Raise DataError, with the `advice`, if the prefix was changed."""
        if (self.size, self.crc32) != _prefix(path, self.size):
            raise DataError(f"{path}: was changed since the unfinished build; {advice}")


def _prefix(path: Path, size: int) -> tuple[int, int]:
    """(number of bytes, CRC-32) of the first `size` bytes of a file; fewer if it is shorter."""
    length = crc = 0
    try:
        with open(path, "rb") as file:
            while data := file.read(min(CHUNK, size - length)):
                length, crc = length + len(data), zlib.crc32(data, crc)
    except FileNotFoundError:
        return 0, 0
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return length, crc


State = dict[str, NDArray[Any]]


class SplitWriter:
    """Collects documents into blocks, and blocks into shards, in order.

    `claim` is called for each file before it is created.
    """

    def __init__(
        self,
        folder: Path,
        claim: Callable[..., None],
        vocab_size: int,
        shard_mb: float = SHARD_MB,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.folder, self._claim = folder, claim
        self._dtype = token_dtype(vocab_size)
        self._shard_bytes = int(shard_mb * (1 << 20))
        self._block_tokens = block_bytes // self._dtype.itemsize
        self._token_counts: NDArray[np.int64] = np.zeros(vocab_size, np.int64)
        self._shards: NDArray[np.void] = np.zeros(0, index.SHARD)
        self._blocks: list[NDArray[np.void]] = []  # to be concatenated
        self._block_count = 0
        self._open = CommittedPrefix()  # the open shard
        self._pending: list[Block] = []  # of a document each, or of several
        self._pending_tokens = 0
        self._continues = False  # the first pending document began in the block before
        self._boundaries = {index.SENTENCES: CommittedPrefix(), index.DOCUMENTS: CommittedPrefix()}
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        claim(*(folder / name for name in index.INDEX_FILES))

    def add(self, document: Block) -> None:
        """Append a document."""
        limit = self._block_tokens
        while (size := len(document.tokens)) > limit and self._pending_tokens + size > limit:
            room = limit - self._pending_tokens
            cut = int(np.searchsorted(np.cumsum(document.sentences, dtype=np.int64), room, "right"))
            if cut == 0 and not self._pending:
                cut = 1  # a sentence longer than a block
            if cut:
                head, document = document.cut(cut)
                self._append(head)
            self._flush_block()
            self._continues = cut > 0 and len(document.tokens) > 0
        if len(document.tokens):
            self._append(document)
        if self._pending_tokens >= limit:
            self._flush_block()

    @property
    def tokens(self) -> int:
        """The number of tokens in finished blocks."""
        return int(self._token_counts.sum())

    def finish(self) -> None:
        """Close the last block and the last shard, and write the index."""
        self._flush_block()
        self._close_shard()
        with disk_errors(self.folder):
            for name, committed in self._boundaries.items():
                committed.append(self.folder / name, b"")
            index.write_index(self.folder, [self._shards], self._blocks, self._token_counts)

    @property
    def state(self) -> State:
        """The state for `restore`; the files that it describes are synced to disk."""
        for path in (self._open_path, *(self.folder / name for name in self._boundaries)):
            if path.exists():
                with disk_errors(path):
                    fsync(path)
        prefixes = (self._open, *self._boundaries.values())
        return {
            "numbers": np.array(
                [self._block_count, self._pending_tokens, self._continues], np.int64
            ),
            "committed": np.array([(prefix.size, prefix.crc32) for prefix in prefixes], np.int64),
            "token_counts": self._token_counts,
            "shards": self._shards.view(np.uint8),
            "blocks": np.concatenate([np.zeros(0, index.BLOCK), *self._blocks]).view(np.uint8),
            **self._block.arrays,
        }

    def restore(self, state: State, advice: str) -> None:
        """Resume from `state`; shards finished after it are written again.

        Raises DataError, with the `advice`, if the files do not match `state`.
        """
        self._block_count, self._pending_tokens, continues = state["numbers"].tolist()
        self._continues = bool(continues)
        committed = [CommittedPrefix(size, crc32) for size, crc32 in state["committed"].tolist()]
        self._open, self._boundaries = (
            committed[0],
            dict(zip(self._boundaries, committed[1:], strict=True)),
        )
        self._token_counts = state["token_counts"].copy()
        self._shards = state["shards"].view(index.SHARD)
        self._blocks = [state["blocks"].view(index.BLOCK)]
        held = Block.of(state)
        self._pending = [held] if len(held.documents) else []
        with disk_errors(self.folder):
            self._drop_later_files()
        self._verify(advice)

    def _drop_later_files(self) -> None:
        finished = self.folder / index.shard_name(len(self._shards))
        if finished.exists() and self._open.size:
            finished.rename(self._open_path)
        for path in self.folder.glob("shard-*.tar"):
            if index.shard_number(path.name) >= len(self._shards):
                path.unlink()
        for path in self.folder.glob(".shard-*.part"):
            if path != self._open_path:
                path.unlink()

    def _verify(self, advice: str) -> None:
        """Raise DataError if a file does not match the state.

        For finished shards only the size is checked; ``tandem data check`` reads them.
        """
        for number, record in enumerate(self._shards):
            path = self.folder / index.shard_name(number)
            if not path.is_file() or path.stat().st_size != record["bytes"]:
                raise DataError(f"{path}: was changed since the unfinished build; {advice}")
        self._open.verify(self._open_path, advice)
        for name, committed in self._boundaries.items():
            committed.verify(self.folder / name, advice)

    def _append(self, document: Block) -> None:
        self._pending.append(document)
        self._pending_tokens += len(document.tokens)

    @property
    def _block(self) -> Block:
        """The pending documents, as a block."""
        none = np.zeros(0, self._dtype), np.zeros(0, "<u2"), np.zeros(0, "<u4")
        held = joined(self._pending or [Block(*none)])
        others = tuple(other.narrow for other in held.others)
        return Block(
            held.tokens.astype(self._dtype, copy=False),
            held.sentences.astype("<u2", copy=False),
            held.documents.astype("<u4", copy=False),
            others,
        )

    def _flush_block(self) -> None:
        if not self._pending:
            return
        block = self._block
        self._pending, self._pending_tokens = [], 0
        self._token_counts += np.bincount(block.tokens, minlength=len(self._token_counts))
        data = encode_block(f"block-{self._block_count:09d}", block)
        sizes = (len(block.documents), len(block.sentences), len(block.tokens))
        record = np.array(
            [(self._open.size, len(data), zlib.crc32(data), *sizes, self._continues)], index.BLOCK
        )
        self._continues = False
        if not self._open.size:
            self._claim(self._open_path, self.folder / index.shard_name(len(self._shards)))
        with disk_errors(self._open_path):
            self._open.append(self._open_path, data)
            for name, array in (
                (index.SENTENCES, block.sentences),
                (index.DOCUMENTS, block.documents),
            ):
                self._boundaries[name].append(self.folder / name, array.tobytes())
        self._blocks.append(record)
        self._block_count += 1
        if self._open.size >= self._shard_bytes:
            self._close_shard()

    @property
    def _open_path(self) -> Path:
        return self.folder / f".{index.shard_name(len(self._shards))}.part"

    def _close_shard(self) -> None:
        if not self._open.size:
            return
        with disk_errors(self._open_path):
            self._open.append(self._open_path, END_OF_TAR)
        record = np.zeros(1, index.SHARD)
        record["bytes"] = self._open.size
        record["sha256"] = np.frombuffer(publish(self._open_path, len(self._shards)), np.uint8)
        done = int(self._shards["blocks"].sum())
        joined = np.concatenate(self._blocks)
        self._blocks, blocks = [joined], joined[done:]
        record["first_block"], record["blocks"] = done, len(blocks)
        for name in ("documents", "sentences", "tokens"):
            record[name] = blocks[name].sum(dtype=np.uint64)
        self._shards = np.concatenate([self._shards, record])
        self._open = CommittedPrefix()


def publish(part: Path, number: int) -> bytes:
    """Sync a finished shard to disk and rename it to its visible name; returns its SHA-256."""
    with disk_errors(part):
        digest = bytes.fromhex(sha256(part))
        fsync(part)
        part.rename(part.with_name(index.shard_name(number)))
    return digest


def refuse_existing(paths: Iterable[Path]) -> None:
    """Raise DataError for the first file that a command would overwrite."""
    for path in paths:
        if os.path.lexists(path):
            raise DataError(f"{path}: exists; move it away, or choose another --out")


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the errors of a full or read-only disk into a DataError that names the path.

    A plain OSError without a number is numpy's, which has written a part of an array.
    """
    try:
        yield
    except OSError as error:
        is_short = error.errno is None and type(error) is OSError
        if is_short or error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"{path.parent}: the disk is full; free some space and run the same command again"
            ) from None
        if error.errno in (errno.ENOTDIR, errno.EEXIST) and (file := file_above(path)):
            raise DataError(f"{file}: is a file, where a folder is needed") from None
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from None


def file_above(path: Path) -> Path | None:
    """The file that stands where `path`, or a folder above it, is to be."""
    return next((place for place in (path, *path.parents) if place.is_file()), None)
