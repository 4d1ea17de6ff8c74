"""Verifying a corpus: ``tandem data check``.

Every file is read once, from its beginning to its end, and compared with the size and SHA-256 that
the manifest, or for shards the index, has of it; of a shard also each block's checksum, and its
members as `tarfile` (which knows nothing of our index) lists them. Kept sequence counts have a
checksum of their own.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from data_pipeline.errors import BadShard, DataError
from data_pipeline.reading.corpus import SPLITS, Corpus, CorpusSplit, origin_of
from data_pipeline.shards import manifest
from data_pipeline.shards.blocks import MEMBERS, token_dtype
from data_pipeline.shards.index import Index, shard_name
from data_pipeline.shards.kept import PATTERN, is_sound
from data_pipeline.shards.manifest import CHUNK
from data_pipeline.shards.sources import is_url


def check(folder: str) -> list[str]:
    """What is wrong with the corpus in `folder`, one line each; empty when all is well.

    Shards are looked at where their index is sound. Raises DataError when there is no corpus, or
    its manifest is damaged.
    """
    if is_url(folder):
        raise DataError(f"{folder}: only a corpus in a folder can be checked")
    place = Path(folder)
    tree = manifest.read(place)
    files = manifest.files_of(tree)
    faults = {name: manifest.fault(place / name, record) for name, record in files.items()}
    found = [f"{place / name}: {wrong}" for name, wrong in faults.items() if wrong]
    for name in SPLITS:
        found += _kept_files(place / name, origin_of(files, name))
        if not any(wrong for file, wrong in faults.items() if file.startswith(f"{name}/")):
            found += _shards(Corpus.of(folder, place, tree), name)
    return found


def _shards(corpus: Corpus, name: str) -> Iterator[str]:
    """What is wrong with the shards of a split whose index is sound."""
    if not len(Index.open(corpus.folder / name).blocks):
        return
    split = corpus.split(name)
    for number in range(len(split.index.shards)):
        yield from check_shard(split, number)
    yield from _strangers(split)


def _kept_files(folder: Path, origin: str) -> Iterator[str]:
    for path in sorted(folder.glob(PATTERN)):
        if not is_sound(path, origin):
            yield f"{path}: damaged; remove it: it is computed again when it is needed"


def check_shard(split: CorpusSplit, number: int) -> Iterator[str]:
    """What is wrong with one shard."""
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
        yield f"{path}: its SHA-256 is not that of the index"
    for name in _members(end):
        yield f"{path}: holds a member that is not ours: {name}"


def _check_block(split: CorpusSplit, number: int, data: bytes, path: Path) -> Iterator[str]:
    try:
        block = split.decode_block(number, data)
    except BadShard as error:
        yield str(error)
        return
    if (
        not block.adds_up
        or block.tokens.dtype != token_dtype(split.vocabulary.vocab_size)
        or block.tokens.max(initial=0) >= split.vocabulary.vocab_size
    ):
        yield f"{path}: block {number} is not as the index says"
    names = _members(data)
    key = names[0].partition(".")[0] if names else ""  # a merge leaves a part's own numbers
    if not key.startswith("block-") or names != [f"{key}.{name}.npy" for name in MEMBERS]:
        yield f"{path}: block {number} has other members: {', '.join(names)}"


def _members(data: bytes) -> list[str]:
    """The names in a piece of a tar file; none where it is not one."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            return tar.getnames()
    except (tarfile.TarError, OSError, ValueError, OverflowError):
        return []


def _strangers(split: CorpusSplit) -> list[str]:
    known = {shard_name(number) for number in range(len(split.index.shards))}
    return [
        f"{path}: not in the index"
        for path in sorted(split.folder.glob("*.tar"))
        if path.name not in known
    ]
