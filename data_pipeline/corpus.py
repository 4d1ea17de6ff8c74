"""Opening a built corpus: its vocabulary, its splits and how many sequences each block makes."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline import packing
from data_pipeline.build import FORMAT
from data_pipeline.errors import DataError
from data_pipeline.index import Index, shard_name
from data_pipeline.order import SequenceCounts
from data_pipeline.shards import Block, decode_block
from data_pipeline.tokenization import Vocabulary


@dataclass(frozen=True)
class CorpusSplit:
    """The training or the held-out part of a corpus."""

    folder: Path
    index: Index
    vocabulary: Vocabulary

    def read_block(self, number: int) -> Block:
        """Read and verify one block. Raises DataError naming the shard when it is not as built."""
        record = self.index.blocks[number]
        path = self.folder / shard_name(self.index.shard_of(number))
        try:
            with open(path, "rb") as file:
                file.seek(int(record["offset"]))
                data = file.read(int(record["bytes"]))
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        if len(data) < record["bytes"]:
            raise DataError(f"{path}: truncated inside block {number}; build the corpus again")
        if zlib.crc32(data) != record["crc32"]:
            raise DataError(f"{path}: damaged in block {number} (checksum); build the corpus again")
        return decode_block(data)

    def sequence_counts(self, kind: str, length: int) -> SequenceCounts:
        """How many sequences each block makes with packing `kind` at sequence length `length`.

        Computed from the sentence boundaries once and kept beside the index. Ranks that find no
        file all compute the same one; the last rename wins, so nothing is ever half-written.
        """
        path = self.folder / f"sequences-{kind}-{length}.npy"
        try:
            per_block = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError):
            per_block = self._count(kind, length)
            _save_atomically(path, per_block)
        first = np.append(self.index.shards["first_block"], len(self.index.blocks)).astype(np.int64)
        totals = np.concatenate([[0], np.cumsum(per_block, dtype=np.int64)])
        return SequenceCounts(per_block, totals[first[1:]] - totals[first[:-1]], first)

    def _count(self, kind: str, length: int) -> NDArray[np.uint32]:
        return np.array(
            [
                len(packing.spans(self.read_block(number), kind, length).starts)
                for number in range(len(self.index.blocks))
            ],
            np.uint32,
        )


@dataclass(frozen=True)
class Corpus:
    """A corpus folder as `data_pipeline.build` leaves it."""

    folder: Path
    vocabulary: Vocabulary

    @classmethod
    def open(cls, path: str) -> Corpus:
        """Open the corpus at `path`; reads no shard. Raises DataError when there is none."""
        folder = Path(path)
        try:
            tree = json.loads((folder / "corpus.json").read_text())
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
        if tree.get("format") != FORMAT:
            raise DataError(f"{folder}: of another format version; build the corpus again")
        return cls(folder, Vocabulary.from_json(tree["vocabulary"]))

    def split(self, name: str) -> CorpusSplit:
        """The split called "train" or "val". Raises DataError when it has no documents."""
        split = CorpusSplit(self.folder / name, Index.open(self.folder / name), self.vocabulary)
        if not len(split.index.blocks):
            raise DataError(f"{split.folder}: has no documents; build with another --val-fraction")
        return split

    @property
    def vocab_size(self) -> int:
        """Rows that an embedding table for this corpus needs."""
        return self.vocabulary.vocab_size

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the map from token to id that the corpus was built with."""
        return self.vocabulary.fingerprint

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
                f"{self.folder}: built with a vocabulary of {self.vocab_size} tokens, "
                f"but the model has vocab_size {vocab_size}"
            )
        if fingerprint is not None and fingerprint != self.fingerprint:
            raise DataError(
                f"{self.folder}: built with another vocabulary than the model's "
                f"(fingerprint {self.fingerprint[:12]}, not {fingerprint[:12]}); "
                "build it with the model's tokenizer"
            )


def _save_atomically(path: Path, array: NDArray) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.part")
    try:
        with open(part, "wb") as file:
            np.save(file, array)
        part.replace(path)
    except OSError:
        # A read-only or full corpus folder only means that the next process counts again.
        part.unlink(missing_ok=True)
