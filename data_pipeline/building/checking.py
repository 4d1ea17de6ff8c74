"""Verifying a corpus: ``tandem data check``.

Every file is read once, from beginning to end. Its size and SHA-256 are compared with those in the
manifest or, for shards, in the index. In a shard each block's checksum is verified too, and the
tar members are listed with `tarfile`, independently of the index. Cached sequence counts have a
checksum of their own.
"""

import hashlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from data_pipeline.errors import BadShard, DataError
from data_pipeline.reading.corpus import SPLITS, Corpus, CorpusSplit, index_digest
from data_pipeline.shards import manifest
from data_pipeline.shards.blocks import token_dtype
from data_pipeline.shards.index import PATTERN, Index, is_intact, shard_name
from data_pipeline.shards.manifest import CHUNK
from data_pipeline.shards.sources import is_url


def check(folder: str) -> list[str]:
    """The faults of the corpus in `folder`, one line each; empty if there are none.

    The shards of a split are checked only if its index is intact. Raises DataError if there is no
    corpus or its manifest is damaged.
    """
    if is_url(folder):
        raise DataError(f"{folder}: is a URL; only a corpus in a folder can be checked")
    place = Path(folder)
    tree = manifest.read(place)
    files = manifest.files_of(tree)
    faults = {name: manifest.fault(place / name, record) for name, record in files.items()}
    unchecked = dict.fromkeys(SPLITS, "; the shards beside it are not checked")
    lines = [
        f"{place / name}: {wrong}{unchecked.get(name.partition('/')[0], '')}"
        for name, wrong in faults.items()
        if wrong
    ]
    for name in SPLITS:
        lines += _damaged_counts(place / name, index_digest(files, name))
        if not any(wrong for file, wrong in faults.items() if file.startswith(f"{name}/")):
            lines += _shards(Corpus.of(folder, place, tree), name)
    return lines


def _shards(corpus: Corpus, name: str) -> Iterator[str]:
    """The faults of a split's shards; its index must be intact."""
    if not len(Index.open(corpus.folder / name).blocks):
        return
    split = corpus.split(name)
    for number in range(len(split.index.shards)):
        yield from check_shard(split, number)
    yield from _unlisted_shards(split)


def _damaged_counts(folder: Path, origin: str) -> Iterator[str]:
    for path in sorted(folder.glob(PATTERN)):
        if not is_intact(path, origin):
            yield f"{path}: damaged; remove it, and it is computed again when it is needed"


def check_shard(split: CorpusSplit, number: int) -> Iterator[str]:
    """The faults of one shard."""
    path = split.folder / shard_name(number)
    try:
        with open(path, "rb") as file:
            yield from _check_contents(split, number, path, file)
    except FileNotFoundError:
        yield f"{path}: missing"
    except OSError as error:
        yield f"{path}: cannot be read: {error.strerror}"


def _check_contents(split: CorpusSplit, number: int, path: Path, file: BinaryIO) -> Iterator[str]:
    record = split.index.shards[number]
    digest, size, end = hashlib.sha256(), 0, b""
    first = int(record["first_block"])
    for block in range(first, first + int(record["blocks"])):
        data = file.read(int(split.index.blocks[block]["bytes"]))
        digest.update(data)
        size += len(data)
        yield from _check_block(split, block, data, path)
    while data := file.read(CHUNK):
        digest.update(data)
        size += len(data)
        end = end or data
    if size != record["bytes"]:
        yield f"{path}: {size} bytes instead of {record['bytes']}"
    elif digest.digest() != record["sha256"].tobytes():
        yield f"{path}: its SHA-256 differs from the one in the index"
    for name in _members(end):
        yield f"{path}: holds a member that no build wrote: {name}"


def _check_block(split: CorpusSplit, number: int, data: bytes, path: Path) -> Iterator[str]:
    try:
        block = split.decode_block(number, data)
    except BadShard as error:
        yield str(error)
        return
    vocab_size = len(split.index.token_counts)
    if (
        not block.adds_up
        or block.tokens.dtype != token_dtype(vocab_size)
        or block.tokens.max(initial=0) >= vocab_size
    ):
        yield f"{path}: block {number} does not match the index"
    names = _members(data)
    key = names[0].partition(".")[0] if names else ""  # a merge does not rename members
    if not key.startswith("block-") or names != [f"{key}.{name}.npy" for name in block.arrays]:
        yield f"{path}: block {number} has other members: {', '.join(names)}"


def _members(data: bytes) -> list[str]:
    """The member names in a piece of a tar file; none if it cannot be parsed."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            return tar.getnames()
    except (tarfile.TarError, OSError, ValueError, OverflowError):
        return []


def _unlisted_shards(split: CorpusSplit) -> list[str]:
    known = {shard_name(number) for number in range(len(split.index.shards))}
    return [
        f"{path}: not in the index"
        for path in sorted(split.folder.glob("*.tar"))
        if path.name not in known
    ]
