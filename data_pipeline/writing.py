"""Writing the shards of one split: documents in, finished tar files out.

A shard is written under a hidden name and renamed when it is complete and on disk, so that a
visible shard is always whole.
"""

from __future__ import annotations

import errno
import hashlib
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.index import BLOCK, SHARD, shard_name, write_index
from data_pipeline.shards import BLOCK_BYTES, END_OF_TAR, Block, encode_block


class SplitWriter:
    """Collects documents into blocks and blocks into shards, in the order they come."""

    def __init__(self, folder: Path, dtype: np.dtype, vocab_size: int, shard_bytes: int) -> None:
        self.folder = folder
        self.dtype = dtype
        self.shard_bytes = shard_bytes
        self.token_counts = np.zeros(vocab_size, np.int64)
        self.shards: list[NDArray[np.void]] = []
        self.blocks: list[NDArray[np.void]] = []
        self._first_block = 0  # of the open shard
        self._written = 0  # bytes in the open shard
        self._pending: list[tuple[NDArray, NDArray]] = []  # (tokens, sentences) per document
        self._pending_tokens = 0
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, tokens: NDArray[np.integer], sentences: NDArray[np.uint16]) -> None:
        """Append a document: its ids and the number of ids of each sentence."""
        limit = BLOCK_BYTES // self.dtype.itemsize
        while self._pending_tokens + len(tokens) > limit and len(tokens) > limit:
            cut = int(np.searchsorted(np.cumsum(sentences), limit - self._pending_tokens, "right"))
            head = int(sentences[:cut].sum())
            if cut:
                self._append(tokens[:head], sentences[:cut])
            tokens, sentences = tokens[head:], sentences[cut:]
            self._flush_block()
        self._append(tokens, sentences)
        if self._pending_tokens >= limit:
            self._flush_block()

    def finish(self) -> None:
        """Close the last block and shard and write the index."""
        self._flush_block()
        self._close_shard()
        with disk_errors(self.folder):
            write_index(self.folder, self.shards, self.blocks, self.token_counts)

    def _append(self, tokens: NDArray[np.integer], sentences: NDArray[np.uint16]) -> None:
        self._pending.append((tokens, sentences))
        self._pending_tokens += len(tokens)

    def _flush_block(self) -> None:
        if not self._pending:
            return
        tokens = np.concatenate([one for one, _ in self._pending]).astype(self.dtype, copy=False)
        sentences = np.concatenate([one for _, one in self._pending]).astype("<u2", copy=False)
        documents = np.array([len(one) for _, one in self._pending], "<u4")
        self._pending, self._pending_tokens = [], 0
        self.token_counts += np.bincount(tokens, minlength=len(self.token_counts))
        data = encode_block(f"block-{len(self.blocks):09d}", Block(tokens, sentences, documents))
        record = np.zeros(1, BLOCK)
        record[0] = (
            self._written,
            len(data),
            zlib.crc32(data),
            len(documents),
            len(sentences),
            len(tokens),
        )
        self._write(data)
        self.blocks.append(record)
        if self._written >= self.shard_bytes:
            self._close_shard()

    @property
    def _open_path(self) -> Path:
        return self.folder / f".{shard_name(len(self.shards))}.part"

    def _write(self, data: bytes) -> None:
        with disk_errors(self._open_path), open(self._open_path, "ab") as file:
            file.truncate(self._written)  # drops what a killed build wrote beyond its journal
            file.write(data)
        self._written += len(data)

    def _close_shard(self) -> None:
        if not self._written:
            return
        self._write(END_OF_TAR)
        blocks = np.concatenate(self.blocks[self._first_block :])
        record = np.zeros(1, SHARD)
        record["bytes"] = self._written
        record["sha256"] = np.frombuffer(publish(self._open_path, len(self.shards)), np.uint8)
        record["first_block"] = self._first_block
        record["blocks"] = len(blocks)
        for name in ("documents", "sentences", "tokens"):
            record[name] = blocks[name].sum(dtype=np.uint64)
        self.shards.append(record)
        self._first_block, self._written = len(self.blocks), 0


def publish(part: Path, number: int) -> bytes:
    """Make a finished shard durable and visible; returns its SHA-256."""
    with disk_errors(part), open(part, "rb") as file:
        digest = hashlib.sha256()
        while data := file.read(1 << 22):
            digest.update(data)
        os.fsync(file.fileno())
        part.rename(part.with_name(shard_name(number)))
    return digest.digest()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns a full or forbidden disk into a DataError naming the place."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"{path.parent}: the disk is full; free some space and run the same command again"
            ) from None
        raise DataError(f"{path}: cannot be written: {error.strerror}") from None
