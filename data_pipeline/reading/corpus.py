"""Opening a corpus: its vocabulary, its splits and the number of sequences in each block."""

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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.config import DataConfig
from data_pipeline.errors import BadShard, DataError
from data_pipeline.order import SequenceCounts
from data_pipeline.packing import sequences as packing
from data_pipeline.packing.kinds.pairs import Pool, pair_spans
from data_pipeline.packing.sequences import PackingRules
from data_pipeline.shards import manifest
from data_pipeline.shards.blocks import Block, decode_block, joined
from data_pipeline.shards.index import (
    INDEX_FILES,
    Index,
    cached_array,
    keep_array,
    kept_array,
    map_array,
    shard_name,
)
from data_pipeline.shards.manifest import MANIFEST, FileRecord
from data_pipeline.shards.ranges import Ranged, Staged, serves_ranges
from data_pipeline.shards.sources import Folder, Remote, is_url, join
from data_pipeline.tokenization.alignment import differing_text
from data_pipeline.tokenization.tokenizer import Vocabulary, load

SPLITS = ("train", "val")
LONG_DOCUMENT = 20_000  # tokens on average: the text may have no blank lines
WORD_STARTS = "word_starts.npy"
BUILD_AGAIN = "build it with the model's tokenizer"
TOKENIZER = "tokenizer"  # its folder


def other_tokenizer(number: int) -> str:
    """The folder of another tokenizer by which examples are read, from 0."""
    return f"{TOKENIZER}-{number + 1}"


@dataclass(frozen=True)
class CorpusSplit:
    """The training or the held-out part of a corpus. `name` is its folder or URL."""

    name: str
    index: Index
    vocabulary: Vocabulary
    shards: Folder | Ranged | Remote | Staged
    folder: Path  # of the index
    index_digest: str  # identifies the contents of the index

    @property
    def tokenizer_dir(self) -> Path:
        """The tokenizer that the corpus was built with, in Hugging Face format."""
        return self.folder.parent / TOKENIZER

    def staged_in(self, folder: Path) -> CorpusSplit:
        """This split, reading copies of its blocks in `folder` where they exist.

        A split whose shards are fetched whole is returned unchanged: it has its own cache.
        """
        if not isinstance(self.shards, Folder | Ranged):
            return self
        return dataclasses.replace(self, shards=Staged(self.shards, folder))

    def read_block(self, number: int) -> Block:
        """Read and verify one block. Raises BadShard, naming the shard, if it is damaged."""
        record = self.index.blocks[number]
        shard = shard_name(self.index.shard_of(number))
        data = self.shards.read(shard, int(record["offset"]), int(record["bytes"]))
        return self.decode_block(number, data)

    def decode_block(self, number: int, data: bytes) -> Block:
        """Verify and decode block `number` from its bytes. Raises BadShard if they are damaged."""
        record = self.index.blocks[number]
        shard = shard_name(self.index.shard_of(number))
        if len(data) < record["bytes"]:
            raise BadShard(f"{self.name}/{shard}: truncated inside block {number}")
        if zlib.crc32(data) != record["crc32"]:
            raise BadShard(f"{self.name}/{shard}: damaged in block {number} (checksum)")
        try:
            block = decode_block(data)
        except (ValueError, tarfile.TarError) as error:
            raise BadShard(f"{self.name}/{shard}: block {number} is malformed: {error}") from None
        if block.sizes != (record["tokens"], record["sentences"], record["documents"]):
            raise BadShard(f"{self.name}/{shard}: block {number} does not match the index")
        return block

    def sequence_counts(self, rules: PackingRules) -> SequenceCounts:
        """The number of sequences in each block with the given packing and length.

        They are computed once, from the sentence boundaries in the index, and cached beside it. So
        are the sums over the blocks of each shard. With both, opening an index does not read it.
        """
        path = self._counts_of(rules)
        shards, blocks = self.index.shards, self.index.blocks
        first = np.append(shards["first_block"], len(blocks)).astype(np.int64)
        per_block = cached_array(path, self.index_digest, len(blocks), lambda: self.count(rules))
        per_shard = cached_array(
            path.with_name(f"{path.stem}-shards.npy"),
            self.index_digest,
            len(shards),
            lambda: np.add.reduceat(per_block, first[:-1], dtype=np.int64),
        )
        return SequenceCounts(per_block, per_shard, first)

    def has_counts(self, rules: PackingRules) -> bool:
        """Whether `sequence_counts` need not compute the counts of these rules."""
        path, blocks = self._counts_of(rules), len(self.index.blocks)
        return kept_array(path, self.index_digest, blocks) is not None

    def keep_counts(self, rules: PackingRules, per_block: NDArray[np.uint32]) -> None:
        """Hand the counts of all blocks to `sequence_counts`, in this process if not in a file."""
        keep_array(self._counts_of(rules), self.index_digest, per_block)

    def count(
        self, rules: PackingRules, first: int = 0, last: int | None = None
    ) -> NDArray[np.uint32]:
        """The number of sequences in each block from `first` up to `last`; None: to the end.

        It takes 2 to 4 ms for each block. Raises DataError for boundaries that are damaged.
        """
        if rules.blocks > 1:
            numbers = range(len(self.index.blocks))[first:last]
            return np.fromiter((self._count_together(each, rules) for each in numbers), np.uint32)
        bounds = self.index.boundaries(first, last)
        return np.fromiter((packing.count(block, rules) for block in bounds), np.uint32)

    def together(self, block: int, rules: PackingRules) -> range:
        """The blocks of a shard that are packed as one, of which `block` is one."""
        shard = self.index.shards[self.index.shard_of(block)]
        first = int(shard["first_block"])
        begin = block - (block - first) % rules.blocks
        return range(begin, min(begin + rules.blocks, first + int(shard["blocks"])))

    def boundaries(self, block: int, rules: PackingRules) -> Block:
        """The boundaries of all blocks that are packed as one with `block`."""
        numbers = self.together(block, rules)
        return joined(list(self.index.boundaries(numbers.start, numbers.stop)))

    def _count_together(self, block: int, rules: PackingRules) -> int:
        """The sequences of the blocks that are packed as one, which count as the first one's."""
        if block != self.together(block, rules).start:
            return 0
        return packing.count(self.boundaries(block, rules), rules)

    @cached_property
    def word_starts(self) -> NDArray[np.bool_]:
        """[vocab_size] True for tokens that begin a word."""
        return map_array(self.folder.parent / WORD_STARTS)

    def _counts_of(self, rules: PackingRules) -> Path:
        return self.folder / f"sequences-{rules.name}.npy"


@dataclass(frozen=True)
class Corpus:
    """A finished corpus, in a folder or behind a URL.

    `folder` holds its index and tokenizer. It is the corpus itself, or the local cache of a URL.
    """

    name: str
    folder: Path
    vocabulary: Vocabulary
    files: Mapping[str, FileRecord]  # all except the shards
    cache_bytes: int = 0
    others: tuple[Vocabulary, ...] = ()  # of tokenizers that also read its examples
    tokenizer: str = TOKENIZER  # its folder

    @classmethod
    def open(cls, path: str, cache_dir: str | None = None, cache_gb: float = 50.0) -> Corpus:
        """Open the corpus at `path` and verify its files, without reading shards.

        Raises DataError if there is no corpus, or one of its files is damaged.
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
    def of(cls, name: str, folder: Path, tree: dict[str, Any], cache_bytes: int = 0) -> Corpus:
        """The corpus in `folder` with the manifest `tree`; its files are not verified."""
        vocabulary = Vocabulary.from_json(tree["vocabulary"])
        others = tuple(map(Vocabulary.from_json, tree["tally"].get("tokenizers", ())))
        return cls(name, folder, vocabulary, manifest.files_of(tree), cache_bytes, others)

    def read_by(self, number: int) -> Corpus:
        """The corpus as another of its tokenizers reads it, from 0."""
        vocabulary, folder = self.others[number], other_tokenizer(number)
        return dataclasses.replace(self, vocabulary=vocabulary, tokenizer=folder)

    def number_of(self, tokenizer: Path) -> int:
        """Which of its other tokenizers makes the tokens of the one in a folder, from 0.

        Raises DataError where none does.
        """
        fingerprint = load(tokenizer)[1].fingerprint
        for number, other in enumerate(self.others):
            folder = self.folder / other_tokenizer(number)
            if other.fingerprint == fingerprint and differing_text(folder, tokenizer) is None:
                return number
        if fingerprint == self.vocabulary.fingerprint:
            raise DataError(
                f"{tokenizer}: is the tokenizer of {self.name} itself; remove the student's "
                "`tokenizer`"
            )
        raise DataError(
            f"{self.name}: does not hold its text in the tokens of {tokenizer}; build it again "
            f"with `--also {tokenizer}`"
        )

    def split(self, name: str) -> CorpusSplit:
        """The split "train" or "val". Raises DataError if it has no documents."""
        folder = self.folder / name
        index = Index.open(folder)
        if not len(index.blocks):
            parts = [Index.open(self.folder / split) for split in SPLITS]
            counts = [sum(part.documents for part in parts), sum(part.tokens for part in parts)]
            raise DataError(f"{self.name}/{name}: has no documents; {remedy(name, *counts)}")
        shards = self._shards(name, index) if self.cache_bytes else Folder(folder)
        digest = index_digest(self.files, name)
        return CorpusSplit(f"{self.name}/{name}", index, self.vocabulary, shards, folder, digest)

    def _shards(self, split: str, index: Index) -> Ranged | Remote:
        """The shards of a split behind a URL: in parts if the server sends them, else whole."""
        url = join(self.name, f"{split}/{{}}")
        if serves_ranges(join(url, shard_name(0))):
            return Ranged(url)
        return Remote(url, self.folder / split, self.cache_bytes, index.shards)

    @property
    def vocab_size(self) -> int:
        """The number of rows that an embedding table for this corpus needs."""
        return self.vocabulary.vocab_size

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the map from token to id that the corpus was built with."""
        return self.vocabulary.fingerprint

    @property
    def content(self) -> str:
        """16 hex digits that identify the content of the corpus, wherever it is stored.

        They hash the vocabulary and the SHA-256 of each file. The index is one of these files and
        holds the SHA-256 of each shard.
        """
        tree = [self.vocabulary.to_json(), sorted((n, f.sha256) for n, f in self.files.items())]
        return hashlib.sha256(json.dumps(tree).encode()).hexdigest()[:16]

    @property
    def token_counts(self) -> NDArray[np.int64]:
        """[vocab_size] the number of occurrences of each id in the training split."""
        return Index.open(self.folder / "train").token_counts

    @property
    def tokenizer_dir(self) -> Path:
        """The tokenizer that the corpus was built with, in Hugging Face format."""
        return self.folder / self.tokenizer

    def require_vocabulary(
        self, vocab_size: int, tokenizer: Path | None = None, remedy: str = BUILD_AGAIN
    ) -> None:
        """Raise DataError unless a model with this vocabulary can be trained on this corpus.

        `tokenizer` is the folder of the model's, which must make the same ids of every text.
        `remedy` says what to do where it does not.
        """
        if vocab_size < self.vocab_size:
            raise DataError(
                f"{self.name}: was built with a vocabulary of {self.vocab_size} tokens, "
                f"but the model has vocab_size {vocab_size}; {remedy}"
            )
        if tokenizer is None:
            return
        fingerprint = load(tokenizer)[1].fingerprint
        if fingerprint != self.fingerprint:
            raise DataError(
                f"{self.name}: was built with another vocabulary than the model's "
                f"(fingerprint {self.fingerprint[:12]}, not {fingerprint[:12]}); {remedy}"
            )
        if (text := differing_text(self.tokenizer_dir, tokenizer)) is not None:
            raise DataError(
                f"{self.name}: was built with a tokenizer of the same vocabulary and other rules "
                f"than in {tokenizer}, which splits {text!r} otherwise; {remedy}"
            )


def remedy(split: str, documents: int, tokens: int) -> str:
    """How to build a corpus of this many documents so that `split` has some."""
    again = f"build again with a {'higher' if split == 'val' else 'lower'} --val-fraction"
    if documents > 1 and tokens < LONG_DOCUMENT * documents:
        return again
    count = "1 document" if documents == 1 else f"{documents:,} long documents"
    rest = "" if documents == 1 else f"; otherwise {again}"
    return (
        f"the corpus has {count}: blank lines separate those of plain text; if each line is one, "
        f"build again with --separator line{rest}"
    )


def index_digest(files: Mapping[str, FileRecord], split: str) -> str:
    """A digest of the contents of a split's index: a hash of the hashes of its files."""
    names = [f"{split}/{name}" for name in INDEX_FILES]
    return hashlib.sha256("".join(files[name].sha256 for name in names).encode()).hexdigest()


def _fetch_index(url: str, cache: Path) -> tuple[Path, dict[str, Any]]:
    """Copy everything except the shards of a remote corpus into the cache.

    The folder is named after the URL and the content of its corpus.json, so that a corpus that was
    built again is fetched again.
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


SAMPLED_BLOCKS = 256

# What this process has measured, by the digest of the index: the start of a job asks several times.
_padding_fractions: dict[tuple[str, PackingRules], float] = {}


def padding_fraction(split: CorpusSplit, rules: PackingRules) -> float:
    """The fraction of an epoch's positions that is padding, from the index alone.

    In a corpus with more than `SAMPLED_BLOCKS` blocks, about that many evenly spread blocks are
    sampled. For pairs the truncation differs a little from epoch to epoch.
    """
    key = split.index_digest, rules
    if key not in _padding_fractions:
        _padding_fractions[key] = _measured_padding(split, rules)
    return _padding_fractions[key]


def _measured_padding(split: CorpusSplit, rules: PackingRules) -> float:
    blocks = len(split.index.blocks)
    used = sequences = 0
    for number in range(0, blocks, -(-blocks // SAMPLED_BLOCKS)):
        tokens, count = _tokens_of(split.boundaries(number, rules), rules)
        used += tokens
        sequences += count
    return 1.0 - used / (sequences * rules.length)


def padding_fractions(
    splits: CorpusSplit | Mapping[str, CorpusSplit], config: DataConfig
) -> list[float]:
    """The padding fraction of each phase of a job; corpora of a mixture count by their rows."""
    starts = (0, *(phase.from_step for phase in config.phases))
    return [_mean_fraction(splits, config, step) for step in starts]


def rows_for_tokens(
    splits: CorpusSplit | Mapping[str, CorpusSplit],
    config: DataConfig,
    step: int,
    tokens: int,
    multiple: int,
) -> int:
    """The global batch size at which a batch of `step` holds about `tokens` tokens without padding.

    It is a multiple of `multiple`, and at least `multiple`. This serves packings with short
    sequences, such as sentence_pair, and jobs whose sequence length changes.
    """
    length, _ = config.length_and_packing_at(step)
    per_sequence = length * (1.0 - _mean_fraction(splits, config, step))
    return max(1, round(tokens / per_sequence / multiple)) * multiple


def _mean_fraction(
    splits: CorpusSplit | Mapping[str, CorpusSplit], config: DataConfig, step: int
) -> float:
    length, kind = config.length_and_packing_at(step)
    rules = PackingRules(kind, length, config.short_sequence_probability)
    if isinstance(splits, CorpusSplit):
        return padding_fraction(splits, rules)
    weights = {name: weight for name, weight in config.weights_at(step).items() if weight}
    padding = sum(weights[name] * padding_fraction(splits[name], rules) for name in weights)
    return padding / sum(weights.values())


def _tokens_of(block: Block, rules: PackingRules) -> tuple[int, int]:
    """(tokens in the sequences of a block, special ones included, sequences)."""
    if rules.is_pair:
        pairs = pair_spans(Pool([block], [0]), rules, key=0)
        lengths = pairs.first_lengths + pairs.second_lengths + 3
        return int(lengths.sum()), len(lengths)
    spans = rules.spans(block)
    return int((spans.lengths + 2).sum()), len(spans)
