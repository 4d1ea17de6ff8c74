"""The tar format: a WebDataset sample is a block of many documents, stored as plain arrays.

A block with the key ``KEY`` is three ``.npy`` members, which ``webdataset`` reads as one sample:

- ``KEY.tokens.npy``: token ids, uint16 where the vocabulary fits, else uint32;
- ``KEY.sentences.npy``: uint16, the number of tokens of each sentence;
- ``KEY.documents.npy``: uint32, the number of sentences of each document.

In a corpus of several tokenizers the block has four more members for each other one, from 1:

- ``KEY.tokens-1.npy``: the ids of the same documents by this tokenizer;
- ``KEY.ours-1.npy``, ``KEY.theirs-1.npy``: uint8 or more, the corpus' own tokens and the other's in
  each aligned span (`data_pipeline.tokenization.alignment`);
- ``KEY.spans-1.npy``: uint32, the number of aligned spans of each document.

A document that is longer than a block is cut between sentences and continues in the next block. At
about 1 MiB per block tar and npy add less than 0.4%. Tar headers carry neither time nor owner, so
equal documents give equal bytes.
"""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

BLOCK_BYTES = 1 << 20
SHARD_MB = 64.0  # MiB of a shard, unless a build is told otherwise
MEMBERS = ("tokens", "sentences", "documents")
RECORD = tarfile.BLOCKSIZE
END_OF_TAR = bytes(2 * RECORD)


@dataclass(frozen=True)
class OtherTokens:
    """Documents by another tokenizer, and the aligned spans of text that both have in common."""

    tokens: NDArray[np.integer]  # [tokens'] uint16 | uint32
    ours: NDArray[np.unsignedinteger]  # [spans] the corpus' own tokens in each
    theirs: NDArray[np.unsignedinteger]  # [spans] this tokenizer's tokens in each
    spans: NDArray[np.uint32]  # [documents] spans of each

    def cut(self, tokens: int) -> tuple[OtherTokens, OtherTokens]:
        """The document up to this many of the corpus' own tokens, and the rest of it.

        A span across the cut keeps its own tokens, in two parts, and loses the other's.
        """
        ends, theirs = (offsets(sizes) for sizes in (self.ours, self.theirs))
        first = int(np.searchsorted(ends, tokens, side="right")) - 1  # spans before the cut
        torn = [0] if ends[first] < tokens else []  # the other's tokens in a part of a span
        last = first + len(torn)
        before, behind = [tokens - ends[first] for _ in torn], [ends[last] - tokens for _ in torn]
        head = [*self.ours[:first], *before], [*self.theirs[:first], *torn]
        rest = [*behind, *self.ours[last:]], [*torn, *self.theirs[last:]]
        return (
            OtherTokens.of(self.tokens[: theirs[first]], *head),
            OtherTokens.of(self.tokens[theirs[last] :], *rest),
        )

    @classmethod
    def of(cls, tokens: NDArray[np.integer], ours: ArrayLike, theirs: ArrayLike) -> OtherTokens:
        """One document."""
        sizes = np.array(ours, np.uint32), np.array(theirs, np.uint32)
        return cls(tokens, *sizes, np.array([len(sizes[0])], np.uint32))

    @property
    def narrow(self) -> OtherTokens:
        """With the sizes of spans in the narrowest type, which is uint8 for all but odd texts."""
        ours, theirs = (
            part.astype(np.min_scalar_type(int(part.max(initial=0))))
            for part in (self.ours, self.theirs)
        )
        return OtherTokens(self.tokens, ours, theirs, self.spans)


@dataclass(frozen=True)
class Block:
    """The documents of one block."""

    tokens: NDArray[np.integer]  # [tokens] uint16 | uint32
    sentences: NDArray[np.uint16]  # [sentences] tokens of each
    documents: NDArray[np.uint32]  # [documents] sentences of each
    others: tuple[OtherTokens, ...] = ()

    @classmethod
    def document(
        cls,
        tokens: NDArray[np.integer],
        sentences: NDArray[np.uint16],
        others: tuple[OtherTokens, ...] = (),
    ) -> Block:
        """A block of one document."""
        return cls(tokens, sentences, np.array([len(sentences)], np.uint32), others)

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> Block:
        """The reverse of `arrays`."""
        names = (_other_members(number) for number in itertools.count(1))
        kept = itertools.takewhile(lambda members: members[0] in arrays, names)
        others = tuple(OtherTokens(*[arrays[name] for name in members]) for members in kept)
        tokens, sentences, documents = (arrays[name] for name in MEMBERS)
        return cls(tokens, sentences, documents, others)

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Its arrays by the names of members."""
        named = {name: getattr(self, name) for name in MEMBERS}
        for number, other in enumerate(self.others, start=1):
            values = (getattr(other, field.name) for field in fields(other))
            named |= zip(_other_members(number), values, strict=True)
        return named

    def cut(self, sentences: int) -> tuple[Block, Block]:
        """The first `sentences` of a document, and the rest of it."""
        at = int(self.sentences[:sentences].sum())
        others = [other.cut(at) for other in self.others]
        head = (self.tokens[:at], self.sentences[:sentences], tuple(head for head, _ in others))
        rest = (self.tokens[at:], self.sentences[sentences:], tuple(rest for _, rest in others))
        return Block.document(*head), Block.document(*rest)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Tokens, sentences and documents."""
        return len(self.tokens), len(self.sentences), len(self.documents)

    @property
    def adds_up(self) -> bool:
        """Whether the sizes of documents and sentences add up to the sentences and tokens."""
        held = int(self.sentences.sum(dtype=np.int64)), int(self.documents.sum(dtype=np.int64))
        return held == self.sizes[:2] and all(map(self._is_aligned, self.others))

    def _is_aligned(self, other: OtherTokens) -> bool:
        sizes = (other.ours, other.theirs, other.spans)
        held = [int(part.sum(dtype=np.int64)) for part in sizes]
        parts = len(self.tokens), len(other.tokens), len(other.ours), len(self.documents)
        return (*held, len(other.spans)) == parts and len(other.ours) == len(other.theirs)


def offsets(sizes: ArrayLike) -> NDArray[np.int64]:
    """The offsets of concatenated parts of these sizes, the end included: [parts + 1]."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def joined(blocks: Sequence[Block]) -> Block:
    """The documents of all of these blocks, as one block."""
    if len(blocks) == 1:
        return blocks[0]
    parts = [block.arrays for block in blocks]
    return Block.of({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest dtype that holds every id."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def encode_block(key: str, block: Block) -> bytes:
    """The tar records of one block."""
    parts = []
    for name, array in block.arrays.items():
        content = io.BytesIO()
        np.lib.format.write_array(content, array, version=(1, 0))
        data = content.getvalue()
        header = tarfile.TarInfo(f"{key}.{name}.npy")
        header.size = len(data)
        parts += [header.tobuf(tarfile.USTAR_FORMAT), data, bytes(-len(data) % RECORD)]
    return b"".join(parts)


def decode_block(data: bytes) -> Block:
    """The block with the tar records `data`, as views. Raises ValueError for malformed data."""
    arrays: dict[str, NDArray[Any]] = {}
    offset, names = 0, _members()
    while offset < len(data) or len(arrays) < len(MEMBERS):
        name = next(names)
        header = tarfile.TarInfo.frombuf(data[offset : offset + RECORD], "utf-8", "strict")
        if not header.name.endswith(f".{name}.npy"):
            raise ValueError(f"unexpected member {header.name}")
        start = offset + RECORD
        arrays[name] = _array(memoryview(data)[start : start + header.size])
        offset = start + header.size + -header.size % RECORD
    return Block.of(arrays)


def _members() -> Iterator[str]:
    """The names of a block's members, in order."""
    yield from MEMBERS
    yield from itertools.chain.from_iterable(map(_other_members, itertools.count(1)))


def _other_members(number: int) -> list[str]:
    """The names of the members of another tokenizer, from 1."""
    return [f"{field.name}-{number}" for field in fields(OtherTokens)]


def _array(data: memoryview) -> NDArray[Any]:
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
