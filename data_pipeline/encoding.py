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
from data_pipeline.word_encoding import Ids, WordEncoder

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
        self._words = WordEncoder(self._tokenizer)
        self._dtype = token_dtype(vocabulary.vocab_size)
        self._reading = reading

    def __call__(self, chunk: RawChunk) -> EncodedChunk:
        """The documents of a chunk as ids; sentences without tokens vanish."""
        parsed = parse(chunk, self._reading)
        documents = [
            [sentence for sentence in sentences if sentence]
            for sentences in self._sentences(parsed.documents)
        ]
        sentences = list(itertools.chain.from_iterable(documents))
        lengths = np.fromiter(map(len, sentences), np.uint16, len(sentences))
        return EncodedChunk(
            tokens=np.fromiter(
                itertools.chain.from_iterable(sentences), self._dtype, lengths.sum(dtype=int)
            ),
            sentences=lengths,
            documents=np.fromiter(map(len, documents), np.uint32, len(documents)),
            digests=[digest(text) for text in parsed.documents],
            problems=parsed.problems,
            characters=sum(map(len, parsed.documents)),
        )

    def _sentences(self, documents: list[str]) -> Iterator[list[Ids]]:
        """The ids of each sentence of each document."""
        ends = [sentence_ends(text) for text in documents]
        found = self._words(documents, ends)
        rest = [number for number, sentences in enumerate(found) if sentences is None]
        whole = encode_whole(
            self._tokenizer,
            [documents[number] for number in rest],
            [ends[number] for number in rest],
        )
        for sentences in found:
            yield next(whole) if sentences is None else sentences


def encode_whole(
    tokenizer: tokenizers.Tokenizer, documents: list[str], ends: list[list[int]]
) -> Iterator[list[Ids]]:
    """The ids of each sentence of each document, encoded whole and cut where the tokens lie."""
    encoded = tokenizer.encode_batch(documents, add_special_tokens=False)
    for one, text, stops in zip(encoded, documents, ends, strict=True):
        cuts = _cuts_by_lookup(one, text, stops) if len(one) <= LOOKUP_TOKENS else None
        if cuts is None:
            starts = [start for start, _ in one.offsets]
            cuts = [bisect_left(starts, end) for end in stops[:-1]]
        bounds = itertools.accumulate([0, *cuts, len(one)], max)
        ids = one.ids
        yield [ids[start:end] for start, end in itertools.pairwise(bounds)]


def _cuts_by_lookup(encoded: tokenizers.Encoding, text: str, ends: list[int]) -> list[int] | None:
    """The first token of each sentence but the first; None where the tokenizer dropped its text.

    A lookup costs the library a walk over the document, the list of all offsets costs five times
    as much as all lookups of a short one.
    """
    cuts = []
    for end in ends[:-1]:
        at = end
        while (token := encoded.char_to_token(at)) is None and text[at].isspace():
            at += 1
        if token is None:
            return None
        place = encoded.token_to_chars(token)
        assert place is not None
        cuts.append(token + (place[0] < end))  # one that reaches over the end belongs before it
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
