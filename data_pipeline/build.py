"""Building a corpus: documents -> token ids with sentence boundaries -> shards and index.

What a corpus folder looks like::

    corpus.json            format, vocabulary facts, and counts for each split
    tokenizer/             a copy of the tokenizer, loadable with transformers.AutoTokenizer
    train/shard-000000.tar ...   see `data_pipeline.shards`
    train/{shards,blocks,token_counts}.npy   see `data_pipeline.index`
    val/                   the same, for the documents held out by their hash

`corpus.json` is written last: a folder that has one is complete.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from data_pipeline import tokenization
from data_pipeline.documents import read_documents
from data_pipeline.errors import DataError
from data_pipeline.index import Index
from data_pipeline.sentences import sentence_ends
from data_pipeline.shards import token_dtype
from data_pipeline.writing import SplitWriter, disk_errors

FORMAT = 1
SPLITS = ("train", "val")
CHUNK_CHARACTERS = 1 << 21


@dataclass(frozen=True)
class EncodedChunk:
    """A run of documents, tokenized."""

    tokens: NDArray[np.integer]  # [tokens]
    sentences: NDArray[np.uint16]  # [sentences] tokens of each
    documents: NDArray[np.uint32]  # [documents] sentences of each
    digests: list[bytes]  # 16 bytes for each document


def build(
    inputs: Sequence[str],
    tokenizer_dir: str,
    out: str,
    *,
    shard_mb: float = 64,
    workers: int = 1,
    val_fraction: float = 0.01,
) -> dict:
    """Build a corpus from text. Returns what `corpus.json` holds.

    Raises DataError for missing or empty inputs, an unusable tokenizer, or a full disk.
    """
    folder = Path(out)
    if (folder / "corpus.json").exists():
        raise DataError(f"{folder}: already holds a corpus; choose another --out or remove it")
    tokenizer, vocabulary = tokenization.load(Path(tokenizer_dir))
    dtype = token_dtype(vocabulary.vocab_size)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for split in SPLITS:
            for old in (folder / split).glob("*"):
                old.unlink()
    writers = {
        split: SplitWriter(folder / split, dtype, vocabulary.vocab_size, int(shard_mb * (1 << 20)))
        for split in SPLITS
    }
    for chunk in chunks(read_documents(inputs)):
        route(encode_chunk(tokenizer, chunk, dtype), writers, val_fraction)
    for writer in writers.values():
        writer.finish()
    if not any(writer.shards for writer in writers.values()):
        raise DataError(f"{', '.join(inputs)}: no documents with text there")
    tree = describe(folder, vocabulary, val_fraction)
    with disk_errors(folder):
        shutil.copytree(tokenizer_dir, folder / "tokenizer", dirs_exist_ok=True)
        part = folder / ".corpus.json.part"
        part.write_text(json.dumps(tree, indent=2) + "\n")
        os.replace(part, folder / "corpus.json")
    return tree


def chunks(documents: Iterable[str]) -> Iterator[list[str]]:
    """Runs of documents of about `CHUNK_CHARACTERS` characters."""
    chunk: list[str] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += len(document)
        if size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def encode_chunk(
    tokenizer: tokenizers.Tokenizer, documents: list[str], dtype: np.dtype
) -> EncodedChunk:
    """Split documents into sentences and encode those; sentences without tokens vanish."""
    ends = [sentence_ends(text) for text in documents]
    sentences = [
        text[start:end]
        for text, stops in zip(documents, ends, strict=True)
        for start, end in zip([0, *stops], stops, strict=False)
    ]
    encoded = tokenizer.encode_batch_fast(sentences, add_special_tokens=False)
    ids = [one.ids for one in encoded]
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    document_of = np.repeat(np.arange(len(documents)), [len(stops) for stops in ends])
    counts = np.bincount(document_of[lengths > 0], minlength=len(documents))
    return EncodedChunk(
        tokens=np.fromiter(itertools.chain.from_iterable(ids), dtype, int(lengths.sum())),
        sentences=lengths[lengths > 0].astype(np.uint16),
        documents=counts.astype(np.uint32),
        digests=[digest(text) for text in documents],
    )


def digest(document: str) -> bytes:
    """16 bytes that identify the text of a document, whatever the tokenizer."""
    return hashlib.blake2b(document.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def held_out(document_digest: bytes, val_fraction: float) -> bool:
    """Whether a document belongs to the validation split: the same in every rebuild."""
    return int.from_bytes(document_digest[:8], "little") < val_fraction * 2.0**64


def route(chunk: EncodedChunk, writers: dict[str, SplitWriter], val_fraction: float) -> None:
    """Hand each document of a chunk to the writer of its split."""
    sentence = np.concatenate([[0], np.cumsum(chunk.documents, dtype=np.int64)])
    token = np.concatenate([[0], np.cumsum(chunk.sentences, dtype=np.int64)])
    for number, name in enumerate(chunk.digests):
        first, last = sentence[number], sentence[number + 1]
        if first < last:
            split = "val" if held_out(name, val_fraction) else "train"
            writers[split].add(
                chunk.tokens[token[first] : token[last]], chunk.sentences[first:last]
            )


def describe(folder: Path, vocabulary: tokenization.Vocabulary, val_fraction: float) -> dict:
    """The contents of `corpus.json`."""
    splits = {}
    for split in SPLITS:
        index = Index.open(folder / split)
        splits[split] = {
            "shards": len(index.shards),
            "blocks": len(index.blocks),
            "documents": index.documents,
            "sentences": int(index.shards["sentences"].sum()),
            "tokens": index.tokens,
            "bytes": int(index.shards["bytes"].sum()),
        }
    return {
        "format": FORMAT,
        "vocabulary": vocabulary.to_json(),
        "val_fraction": val_fraction,
        "splits": splits,
    }
