"""Verifying a corpus: ``tandem data check``.

Every shard is read once: its size and SHA-256, each block's checksum, and its members as `tarfile`
(which knows nothing of our index) lists them.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.corpus import SPLITS, Corpus, CorpusSplit
from data_pipeline.errors import BadShard, DataError
from data_pipeline.index import shard_name
from data_pipeline.shards import MEMBERS, token_dtype


def check(folder: str) -> list[str]:
    """What is wrong with the corpus in `folder`, one line each; empty when all is well.

    Raises DataError when there is no corpus.
    """
    corpus = Corpus.open(folder)
    if corpus.cache_bytes:
        raise DataError(f"{folder}: only a corpus in a folder can be checked")
    found: list[str] = []
    for name in SPLITS:
        try:
            split = corpus.split(name)
        except DataError as error:
            if "no documents" not in str(error):
                found.append(str(error))
            continue
        for number in range(len(split.index.shards)):
            found += check_shard(split, number)
        found += _strangers(split)
    return found


def check_shard(split: CorpusSplit, number: int) -> Iterator[str]:
    """What is wrong with one shard."""
    path = split.folder / shard_name(number)
    record = split.index.shards[number]
    try:
        size = path.stat().st_size
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while data := file.read(1 << 22):
                digest.update(data)
    except FileNotFoundError:
        yield f"{path}: missing"
        return
    except OSError as error:
        yield f"{path}: cannot be read: {error.strerror}"
        return
    if size != record["bytes"]:
        yield f"{path}: {size} bytes instead of {record['bytes']}"
    elif digest.digest() != record["sha256"].tobytes():
        yield f"{path}: its SHA-256 is not that of the index"
    first = int(record["first_block"])
    for block in range(first, first + int(record["blocks"])):
        yield from _check_block(split, block)
    yield from _check_members(path, first, int(record["blocks"]))


def _check_block(split: CorpusSplit, number: int) -> Iterator[str]:
    try:
        block = split.read_block(number)
    except BadShard as error:
        yield str(error)
        return
    record = split.index.blocks[number]
    sizes = tuple(len(getattr(block, name)) for name in MEMBERS)
    if (
        sizes != (record["tokens"], record["sentences"], record["documents"])
        or block.sentences.sum() != sizes[0]
        or block.documents.sum() != sizes[1]
        or block.tokens.dtype != token_dtype(split.vocabulary.vocab_size)
        or block.tokens.max(initial=0) >= split.vocabulary.vocab_size
    ):
        yield f"{split.name}: block {number} is not as the index says"


def _check_members(path: Path, first: int, blocks: int) -> Iterator[str]:
    expected = [
        f"block-{number:09d}.{name}.npy"
        for number in range(first, first + blocks)
        for name in MEMBERS
    ]
    try:
        with tarfile.open(path, "r:") as tar:
            names = tar.getnames()
    except (tarfile.TarError, OSError, ValueError, OverflowError) as error:
        yield f"{path}: not a readable tar file: {error}"
        return
    for name in names:
        if not _is_ours(name):
            yield f"{path}: holds a member that is not ours: {name}"
    if len(names) != len(expected):
        yield f"{path}: {len(names)} members instead of {len(expected)}"


def _is_ours(name: str) -> bool:
    parts = name.split(".")
    return len(parts) == 3 and parts[0].startswith("block-") and parts[1] in MEMBERS


def _strangers(split: CorpusSplit) -> list[str]:
    known = {shard_name(number) for number in range(len(split.index.shards))}
    return [
        f"{path}: not in the index"
        for path in sorted(split.folder.glob("*.tar"))
        if path.name not in known
    ]
