"""The tar format: a WebDataset sample is a block of many documents, stored as three arrays.

A block with the key ``KEY`` is three ``.npy`` members, which ``webdataset`` reads as one sample:

- ``KEY.tokens.npy``: token ids, uint16 where the vocabulary fits, else uint32;
- ``KEY.sentences.npy``: uint16, the number of tokens of each sentence;
- ``KEY.documents.npy``: uint32, the number of sentences of each document.

A document that is longer than a block is cut between sentences and continues in the next block. At
about 1 MiB per block tar and npy add less than 0.4%. Tar headers carry neither time nor owner, so
equal documents give equal bytes.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 20
SHARD_MB = 64.0  # MiB of a shard, unless a build is told otherwise
MEMBERS = ("tokens", "sentences", "documents")
RECORD = tarfile.BLOCKSIZE
END_OF_TAR = bytes(2 * RECORD)


@dataclass(frozen=True)
class Block:
    """The documents of one block."""

    tokens: NDArray[np.integer]  # [tokens] uint16 | uint32
    sentences: NDArray[np.uint16]  # [sentences] tokens of each
    documents: NDArray[np.uint32]  # [documents] sentences of each

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Tokens, sentences and documents."""
        return len(self.tokens), len(self.sentences), len(self.documents)

    @property
    def adds_up(self) -> bool:
        """Whether the sizes of documents and sentences add up to the sentences and tokens."""
        held = int(self.sentences.sum(dtype=np.int64)), int(self.documents.sum(dtype=np.int64))
        return held == self.sizes[:2]


def joined(blocks: Sequence[Block]) -> Block:
    """The documents of all of these blocks, as one block."""
    if len(blocks) == 1:
        return blocks[0]
    return Block(*(np.concatenate([getattr(block, name) for block in blocks]) for name in MEMBERS))


def token_dtype(vocab_size: int) -> np.dtype:
    """The narrowest dtype that holds every id."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def encode_block(key: str, block: Block) -> bytes:
    """The tar records of one block."""
    parts = []
    for name in MEMBERS:
        content = io.BytesIO()
        np.lib.format.write_array(content, getattr(block, name), version=(1, 0))
        data = content.getvalue()
        header = tarfile.TarInfo(f"{key}.{name}.npy")
        header.size = len(data)
        parts += [header.tobuf(tarfile.USTAR_FORMAT), data, bytes(-len(data) % RECORD)]
    return b"".join(parts)


def decode_block(data: bytes) -> Block:
    """The block with the tar records `data`, as views. Raises ValueError for malformed data."""
    arrays, offset = [], 0
    for name in MEMBERS:
        header = tarfile.TarInfo.frombuf(data[offset : offset + RECORD], "utf-8", "strict")
        if not header.name.endswith(f".{name}.npy"):
            raise ValueError(f"unexpected member {header.name}")
        start = offset + RECORD
        arrays.append(_array(memoryview(data)[start : start + header.size]))
        offset = start + header.size + -header.size % RECORD
    return Block(*arrays)


def _array(data: memoryview) -> NDArray:
    """A one-dimensional array of unsigned integers from npy bytes; anything else is refused."""
    stream = io.BytesIO(data[:256])
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("unexpected npy version")
    try:
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    except Exception as error:  # any exception: the header is parsed as a Python literal
        raise ValueError(f"not an npy header: {error}") from None
    if dtype.kind != "u" or len(shape) != 1:
        raise ValueError(f"unexpected array of {dtype}")
    return np.frombuffer(data, dtype, shape[0], stream.tell())
