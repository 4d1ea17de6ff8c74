"""From raw text to token ids with boundaries: what a build's worker process does."""

from __future__ import annotations

import hashlib
import itertools
import os
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from data_pipeline import tokenization
from data_pipeline.documents import Problem, RawChunk, Reading, parse
from data_pipeline.errors import DataError
from data_pipeline.sentences import sentence_ends
from data_pipeline.shards import token_dtype

DIGEST_BYTES = 16
QUEUED_PER_WORKER = 3
LOOKUP_TOKENS = 4096


@dataclass(frozen=True)
class EncodedChunk:
    """A run of documents, tokenized. Documents without a token are problems instead."""

    tokens: NDArray[np.integer]  # [tokens]
    sentences: NDArray[np.uint16]  # [sentences] tokens of each
    documents: NDArray[np.uint32]  # [documents] sentences of each
    digests: list[bytes]  # of the text of each document
    problems: list[Problem]
    characters: int


class Encoder:
    """Encodes raw chunks with one tokenizer."""

    def __init__(self, tokenizer_dir: str, reading: Reading) -> None:
        self._tokenizer, vocabulary = tokenization.load(Path(tokenizer_dir))
        self._dtype = token_dtype(vocabulary.vocab_size)
        self._reading = reading

    def __call__(self, chunk: RawChunk) -> EncodedChunk:
        """The documents of a chunk as ids."""
        parsed = parse(chunk, self._reading)
        return encode(self._tokenizer, parsed.documents, self._dtype, parsed.problems)


def encode(
    tokenizer: tokenizers.Tokenizer,
    documents: list[str],
    dtype: np.dtype,
    problems: list[Problem] | None = None,
) -> EncodedChunk:
    """The ids of documents, with sentence boundaries; sentences without tokens vanish."""
    ends = [sentence_ends(text) for text in documents]
    ids, cuts = [], [np.zeros(0, np.int64)]
    encoded = tokenizer.encode_batch(documents, add_special_tokens=False)
    for one, text, stops in zip(encoded, documents, ends, strict=True):
        ids.append(one.ids)
        cuts.append(_sentence_lengths(one, text, stops))
    lengths = np.concatenate(cuts)
    document_of = np.repeat(np.arange(len(documents)), [len(stops) for stops in ends])
    counts = np.bincount(document_of[lengths > 0], minlength=len(documents))
    return EncodedChunk(
        tokens=np.fromiter(itertools.chain.from_iterable(ids), dtype, int(lengths.sum())),
        sentences=lengths[lengths > 0].astype(np.uint16),
        documents=counts.astype(np.uint32),
        digests=[digest(text) for text in documents],
        problems=problems or [],
        characters=sum(map(len, documents)),
    )


def _sentence_lengths(
    encoded: tokenizers.Encoding, text: str, ends: list[int]
) -> NDArray[np.int64]:
    """The number of tokens of each sentence, from where the tokens lie in the text."""
    cuts = _cuts_by_lookup(encoded, text, ends) if len(encoded) <= LOOKUP_TOKENS else None
    if cuts is None:
        starts = [start for start, _ in encoded.offsets]
        cuts = [bisect_left(starts, end) for end in ends[:-1]]
    return np.diff(np.maximum.accumulate([0, *cuts, len(encoded)]))


def _cuts_by_lookup(encoded: tokenizers.Encoding, text: str, ends: list[int]) -> list[int] | None:
    """The first token of each sentence but the first; None where the tokenizer dropped its text.

    A lookup costs the library a walk over the document, the list of all offsets costs five times
    as much as all lookups of a short one.
    """
    cuts = []
    for at in ends[:-1]:
        while text[at].isspace():
            at += 1
        token = encoded.char_to_token(at)
        if token is None:
            return None
        cuts.append(token)
    return cuts


def digest(document: str) -> bytes:
    """16 bytes that identify the text of a document, whatever the tokenizer."""
    return hashlib.blake2b(document.encode(), digest_size=DIGEST_BYTES).digest()


def held_out(document_digest: bytes, val_fraction: float) -> bool:
    """Whether a document belongs to the validation split: the same in every rebuild."""
    return int.from_bytes(document_digest[:8], "little") < val_fraction * 2.0**64


def encode_all(
    chunks: Iterable[RawChunk], tokenizer_dir: str, reading: Reading, workers: int
) -> Iterator[tuple[RawChunk, EncodedChunk]]:
    """Each chunk with its encoding, in order, by `workers` processes (1: this one)."""
    if workers > 1:
        yield from _in_processes(chunks, tokenizer_dir, reading, workers)
        return
    encoder = Encoder(tokenizer_dir, reading)
    for chunk in chunks:
        yield chunk, encoder(chunk)


def _in_processes(
    chunks: Iterable[RawChunk], tokenizer_dir: str, reading: Reading, workers: int
) -> Iterator[tuple[RawChunk, EncodedChunk]]:
    # Spawned, not forked: the tokenizer library has threads that do not survive a fork.
    with ProcessPoolExecutor(
        workers, get_context("spawn"), _start_worker, (tokenizer_dir, reading)
    ) as pool:
        queue: deque[tuple[RawChunk, Future[EncodedChunk]]] = deque()
        try:
            for chunk in chunks:
                queue.append((chunk, pool.submit(_work, chunk)))
                if len(queue) > workers * QUEUED_PER_WORKER:
                    done, future = queue.popleft()
                    yield done, future.result()
            for done, future in queue:
                yield done, future.result()
        except BrokenProcessPool:
            raise DataError(
                "a tokenizing process died, perhaps out of memory; run the same command again "
                "with fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_encoder: Encoder | None = None  # of a worker process


def _start_worker(tokenizer_dir: str, reading: Reading) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = Encoder(tokenizer_dir, reading)


def _work(chunk: RawChunk) -> EncodedChunk:
    assert _encoder is not None
    return _encoder(chunk)
