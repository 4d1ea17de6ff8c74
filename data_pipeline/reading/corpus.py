"""Opening a built corpus: its vocabulary, its splits and how many sequences each block makes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import BadShard, DataError
from data_pipeline.order.epoch import SequenceCounts
from data_pipeline.packing import sequences as packing
from data_pipeline.packing.sequences import PackingRules
from data_pipeline.shards import manifest
from data_pipeline.shards.arrays import map_array
from data_pipeline.shards.blocks import Block, decode_block
from data_pipeline.shards.index import INDEX_FILES, Index, shard_name
from data_pipeline.shards.kept import kept
from data_pipeline.shards.manifest import MANIFEST, FileRecord
from data_pipeline.shards.sources import Folder, Remote, is_url, join
from data_pipeline.shards.staged import Staged
from data_pipeline.tokenization.tokenizer import Vocabulary

SPLITS = ("train", "val")
WORD_STARTS = "word_starts.npy"


@dataclass(frozen=True)
class CorpusSplit:
    """The training or the held-out part of a corpus. `name` is its folder or URL."""

    name: str
    index: Index
    vocabulary: Vocabulary
    shards: Folder | Remote | Staged
    folder: Path  # of the index
    origin: str  # stands for the contents of the index

    def staged_in(self, folder: Path) -> CorpusSplit:
        """This split, read from copies of its blocks in `folder` where there are any.

        One behind a URL stays as it is: it has its cache.
        """
        if not isinstance(self.shards, Folder):
            return self
        return dataclasses.replace(self, shards=Staged(self.shards, folder))

    def read_block(self, number: int) -> Block:
        """Read and verify one block. Raises BadShard naming the shard when it is not as built."""
        record = self.index.blocks[number]
        shard = shard_name(self.index.shard_of(number))
        data = self.shards.read(shard, int(record["offset"]), int(record["bytes"]))
        return self.decode_block(number, data)

    def decode_block(self, number: int, data: bytes) -> Block:
        """The block that `data`, read where the index says, holds. Raises BadShard likewise."""
        record = self.index.blocks[number]
        shard = shard_name(self.index.shard_of(number))
        if len(data) < record["bytes"]:
            raise BadShard(f"{self.name}/{shard}: cut off inside block {number}")
        if zlib.crc32(data) != record["crc32"]:
            raise BadShard(f"{self.name}/{shard}: damaged in block {number} (checksum)")
        try:
            block = decode_block(data)
        except (ValueError, tarfile.TarError) as error:
            raise BadShard(f"{self.name}/{shard}: block {number} is not ours: {error}") from None
        if block.sizes != (record["tokens"], record["sentences"], record["documents"]):
            raise BadShard(f"{self.name}/{shard}: block {number} is not as the index says")
        return block

    def sequence_counts(self, rules: PackingRules) -> SequenceCounts:
        """How many sequences each block makes with the given packing and length.

        Computed from the sentence boundaries in the index once and kept beside it, as are the
        sums for the shards: with them an index of any size is opened without reading it.
        """
        path = self.folder / f"sequences-{rules.name}.npy"
        shards, blocks = self.index.shards, self.index.blocks
        first = np.append(shards["first_block"], len(blocks)).astype(np.int64)
        per_block = kept(path, self.origin, len(blocks), lambda: self._count(rules))
        per_shard = kept(
            path.with_name(f"{path.stem}-shards.npy"),
            self.origin,
            len(shards),
            lambda: np.add.reduceat(per_block, first[:-1], dtype=np.int64),
        )
        return SequenceCounts(per_block, per_shard, first)

    @cached_property
    def word_starts(self) -> NDArray[np.bool_]:
        """[vocab_size] whether a token begins a word."""
        return map_array(self.folder.parent / WORD_STARTS)

    def _count(self, rules: PackingRules) -> NDArray[np.uint32]:
        counts = np.zeros(len(self.index.blocks), np.uint32)
        for number, boundaries in enumerate(self.index.boundaries()):
            counts[number] = packing.count(boundaries, rules)
        return counts


@dataclass(frozen=True)
class Corpus:
    """A corpus as `data_pipeline.build` leaves it, in a folder or behind a URL.

    `folder` holds its index and tokenizer: the corpus itself, or the local cache of a URL.
    """

    name: str
    folder: Path
    vocabulary: Vocabulary
    files: Mapping[str, FileRecord]  # all but the shards
    cache_bytes: int = 0

    @classmethod
    def open(cls, path: str, cache_dir: str | None = None, cache_gb: float = 50.0) -> Corpus:
        """Open the corpus at `path`; reads no shard.

        Raises DataError when there is none, or one of its files is not as it was built.
        """
        if is_url(path):
            folder, tree = _fetch_index(path, Path(cache_dir or _default_cache()))
        else:
            folder = Path(path)
            tree = manifest.read(folder)
        corpus = cls.of(path, folder, tree, int(cache_gb * 1e9) if is_url(path) else 0)
        manifest.verify(folder, corpus.files)
        return corpus

    @classmethod
    def of(cls, name: str, folder: Path, tree: dict, cache_bytes: int = 0) -> Corpus:
        """The corpus in `folder` of which `tree` is the manifest; its files are not looked at."""
        vocabulary = Vocabulary.from_json(tree["vocabulary"])
        return cls(name, folder, vocabulary, manifest.files_of(tree), cache_bytes)

    def split(self, name: str) -> CorpusSplit:
        """The split called "train" or "val". Raises DataError when it has no documents."""
        folder = self.folder / name
        index = Index.open(folder)
        if not len(index.blocks):
            raise DataError(f"{self.name}/{name}: has no documents; change --val-fraction")
        shards: Folder | Remote = Folder(folder)
        if self.cache_bytes:
            url = (
                self.name.replace("{}", f"{name}/{{}}")
                if "{}" in self.name
                else f"{self.name.rstrip('/')}/{name}"
            )
            shards = Remote(url, folder, self.cache_bytes, index.shards)
        origin = origin_of(self.files, name)
        return CorpusSplit(f"{self.name}/{name}", index, self.vocabulary, shards, folder, origin)

    @property
    def vocab_size(self) -> int:
        """Rows that an embedding table for this corpus needs."""
        return self.vocabulary.vocab_size

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the map from token to id that the corpus was built with."""
        return self.vocabulary.fingerprint

    @property
    def content(self) -> str:
        """16 hex digits that stand for everything that is in the corpus.

        The same wherever it lies: a hash of the vocabulary and of the SHA-256 of each file, the
        index among them, which has those of the shards.
        """
        tree = [self.vocabulary.to_json(), sorted((n, f.sha256) for n, f in self.files.items())]
        return hashlib.sha256(json.dumps(tree).encode()).hexdigest()[:16]

    @property
    def token_counts(self) -> NDArray[np.int64]:
        """[vocab_size] how often each id occurs in the training split."""
        return Index.open(self.folder / "train").token_counts

    @property
    def tokenizer_dir(self) -> Path:
        """The tokenizer that the corpus was built with, in Hugging Face format."""
        return self.folder / "tokenizer"

    def require_vocabulary(self, vocab_size: int, fingerprint: str | None = None) -> None:
        """Raise DataError when a model of another vocabulary is to be trained on this corpus."""
        if vocab_size < self.vocab_size:
            raise DataError(
                f"{self.name}: built with a vocabulary of {self.vocab_size} tokens, "
                f"but the model has vocab_size {vocab_size}"
            )
        if fingerprint is not None and fingerprint != self.fingerprint:
            raise DataError(
                f"{self.name}: built with another vocabulary than the model's "
                f"(fingerprint {self.fingerprint[:12]}, not {fingerprint[:12]}); "
                "build it with the model's tokenizer"
            )


def origin_of(files: Mapping[str, FileRecord], split: str) -> str:
    """What stands for the contents of a split's index: a hash of the hashes of its files."""
    names = [f"{split}/{name}" for name in INDEX_FILES]
    return hashlib.sha256("".join(files[name].sha256 for name in names).encode()).hexdigest()


def _fetch_index(url: str, cache: Path) -> tuple[Path, dict]:
    """Copy everything but the shards of a remote corpus into the cache.

    The folder is named after the URL and the contents of its corpus.json, so that a corpus which
    was built anew is fetched anew.
    """
    key = hashlib.sha256(url.encode()).hexdigest()[:12]
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Remote(url, Path(scratch), 0).fetch(MANIFEST).read_bytes()
    tree = manifest.parse(fresh, join(url, MANIFEST))
    folder = cache / f"{key}-{hashlib.sha256(fresh).hexdigest()[:12]}"
    remote = Remote(url, folder, 0, files=manifest.files_of(tree))
    for name in tree["files"]:
        remote.fetch(name)
    return folder, tree


def _default_cache() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(base) / "tandem")
