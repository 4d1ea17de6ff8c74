"""Opening a built corpus: its vocabulary, its splits and how many sequences each block makes."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline import packing
from data_pipeline.errors import BadShard, DataError
from data_pipeline.index import INDEX_FILES, Index, shard_name
from data_pipeline.order import SequenceCounts
from data_pipeline.packing import PackingRules
from data_pipeline.shards import Block, decode_block
from data_pipeline.sources import Folder, Remote, is_url
from data_pipeline.tokenization import Vocabulary

FORMAT = 1
SPLITS = ("train", "val")


@dataclass(frozen=True)
class CorpusSplit:
    """The training or the held-out part of a corpus. `name` is its folder or URL."""

    name: str
    index: Index
    vocabulary: Vocabulary
    shards: Folder | Remote
    folder: Path  # of the index

    def read_block(self, number: int) -> Block:
        """Read and verify one block. Raises BadShard naming the shard when it is not as built."""
        record = self.index.blocks[number]
        shard = shard_name(self.index.shard_of(number))
        data = self.shards.read(shard, int(record["offset"]), int(record["bytes"]))
        if len(data) < record["bytes"]:
            raise BadShard(f"{self.name}/{shard}: cut off inside block {number}")
        if zlib.crc32(data) != record["crc32"]:
            raise BadShard(f"{self.name}/{shard}: damaged in block {number} (checksum)")
        try:
            return decode_block(data)
        except (ValueError, tarfile.TarError) as error:
            raise BadShard(f"{self.name}/{shard}: block {number} is not ours: {error}") from None

    def sequence_counts(self, rules: PackingRules) -> SequenceCounts:
        """How many sequences each block makes with the given packing and length.

        Computed from the sentence boundaries in the index once and kept beside it, as are the
        sums for the shards: with them an index of any size is opened without reading it.
        """
        name = f"sequences-{rules.name}"
        shards, blocks = self.index.shards, self.index.blocks
        first = np.append(shards["first_block"], len(blocks)).astype(np.int64)
        per_block = self._kept(f"{name}.npy", len(blocks), lambda: self._count(rules))
        per_shard = self._kept(
            f"{name}-shards.npy",
            len(shards),
            lambda: np.add.reduceat(per_block, first[:-1], dtype=np.int64),
        )
        return SequenceCounts(per_block, per_shard, first)

    @cached_property
    def word_starts(self) -> NDArray[np.bool_]:
        """[vocab_size] whether a token begins a word."""
        return np.load(self.folder.parent / "word_starts.npy", allow_pickle=False)

    def _kept(self, name: str, size: int, compute: Callable[[], NDArray]) -> NDArray:
        """An array of so many numbers that is kept beside the index, mapped.

        Ranks that find no file all compute the same one; each renames a whole file into place.
        """
        path = self.folder / name
        try:
            found: NDArray = np.load(path, mmap_mode="r", allow_pickle=False)
            if found.shape != (size,):
                raise ValueError("of another corpus")
        except (OSError, ValueError):
            found = compute()
            _save_atomically(path, found)
        return found

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
    cache_bytes: int = 0

    @classmethod
    def open(cls, path: str, cache_dir: str | None = None, cache_gb: float = 50.0) -> Corpus:
        """Open the corpus at `path`; reads no shard. Raises DataError when there is none."""
        if is_url(path):
            folder, tree = _fetch_index(path, Path(cache_dir or _default_cache()))
        else:
            folder = Path(path)
            tree = _read_json(folder)
        if tree.get("format") != FORMAT:
            raise DataError(f"{path}: of another format version; build the corpus again")
        vocabulary = Vocabulary.from_json(tree["vocabulary"])
        return cls(path, folder, vocabulary, int(cache_gb * 1e9) if is_url(path) else 0)

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
        return CorpusSplit(f"{self.name}/{name}", index, self.vocabulary, shards, folder)

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
        """16 hex digits that stand for the texts of both splits, their order and the vocabulary.

        The same wherever the corpus lies: a hash of the SHA-256 of each shard, which the index has.
        """
        digest = hashlib.sha256(self.fingerprint.encode())
        for split in SPLITS:
            shards = Index.open(self.folder / split).shards["sha256"]
            digest.update(f"{split} {len(shards)}".encode() + shards.tobytes())
        return digest.hexdigest()[:16]

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


def _read_json(folder: Path) -> dict:
    try:
        return json.loads((folder / "corpus.json").read_text())
    except FileNotFoundError:
        if not folder.exists():
            raise DataError(
                f"{folder}: no such corpus; build one with `tandem data build`"
            ) from None
        raise DataError(
            f"{folder}: not a finished corpus (no corpus.json); run `tandem data build` on it"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}/corpus.json: cannot be read: {error}") from None


def _fetch_index(url: str, cache: Path) -> tuple[Path, dict]:
    """Copy everything but the shards of a remote corpus into the cache.

    The folder is named after the URL and the contents of its corpus.json, so that a corpus which
    was built anew is fetched anew.
    """
    key = hashlib.sha256(url.encode()).hexdigest()[:12]
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Remote(url, Path(scratch), 0, None).fetch("corpus.json").read_bytes()
    try:
        tree = json.loads(fresh)
    except ValueError as error:
        raise DataError(f"{url}: corpus.json is not valid: {error}") from None
    folder = cache / f"{key}-{hashlib.sha256(fresh).hexdigest()[:12]}"
    remote = Remote(url, folder, 0, None)
    names = [f"{split}/{name}" for split in SPLITS for name in INDEX_FILES]
    names += ["word_starts.npy", "corpus.json"]
    names += [f"tokenizer/{name}" for name in tree["tokenizer_files"]]
    for name in names:
        remote.fetch(name)
    return folder, tree


def _default_cache() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(base) / "tandem")


def _save_atomically(path: Path, array: NDArray) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.part")
    try:
        with open(part, "wb") as file:
            np.save(file, array)
        part.replace(path)
    except OSError:
        # A read-only or full corpus folder only means that the next process counts again.
        part.unlink(missing_ok=True)
