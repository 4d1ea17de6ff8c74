"""From raw text to token ids with boundaries: what a build's worker process does."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from operator import attrgetter

import numpy as np
import tokenizers
from numpy.typing import NDArray

from data_pipeline.documents import Problem, RawChunk, Reading, parse
from data_pipeline.errors import DataError
from data_pipeline.joined_text import edges
from data_pipeline.sentences import sentence_ends
from data_pipeline.shards import token_dtype
from data_pipeline.tokenization import Vocabulary
from data_pipeline.word_encoding import DocumentIds, WordEncoder

DIGEST_BYTES = 16
QUEUED_PER_WORKER = 3
LOOKUP_TOKENS = 4096

EncoderArguments = tuple[tokenizers.Tokenizer, Vocabulary, Reading]


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

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, vocabulary: Vocabulary, reading: Reading
    ) -> None:
        self._tokenizer = tokenizer
        self._words = WordEncoder(tokenizer, vocabulary.sep)
        self._dtype = token_dtype(vocabulary.vocab_size)
        self._reading = reading

    def __call__(self, chunk: RawChunk) -> EncodedChunk:
        """The documents of a chunk as ids; sentences without tokens vanish."""
        parsed = parse(chunk, self._reading)
        encoded = list(self._encode(parsed.documents))
        has_tokens = [len(one.tokens) > 0 for one in encoded]
        documents = [*itertools.compress(encoded, has_tokens)]
        texts = [*itertools.compress(parsed.documents, has_tokens)]
        empty = [
            Problem(chunk.stretch.path, position, "no token in it")
            for position, has in zip(parsed.positions, has_tokens, strict=True)
            if not has
        ]
        sentences = _joined([one.sentences for one in documents], np.dtype(np.uint16))
        full = sentences > 0
        before = edges([len(one.sentences) for one in documents])
        return EncodedChunk(
            tokens=_joined([one.tokens for one in documents], self._dtype),
            sentences=sentences[full],
            documents=np.diff(edges(full)[before]).astype(np.uint32),
            digests=[digest(text) for text in texts],
            problems=sorted([*parsed.problems, *empty], key=attrgetter("position")),
            characters=sum(map(len, texts)),
        )

    def _encode(self, documents: list[str]) -> Iterator[DocumentIds]:
        """The ids of each document."""
        found = self._words(documents)
        rest = [text for text, one in zip(documents, found, strict=True) if one is None]
        whole = encode_whole(self._tokenizer, rest, [sentence_ends(text) for text in rest])
        for one in found:
            yield next(whole) if one is None else one


def encode_whole(
    tokenizer: tokenizers.Tokenizer, documents: list[str], ends: list[list[int]]
) -> Iterator[DocumentIds]:
    """The ids of each document, encoded whole; sentences are cut where the tokens lie."""
    encoded = tokenizer.encode_batch(documents, add_special_tokens=False)
    for one, text, stops in zip(encoded, documents, ends, strict=True):
        cuts = _cuts_by_lookup(one, text, stops) if len(one) <= LOOKUP_TOKENS else None
        if cuts is None:
            starts = [start for start, _ in one.offsets]
            cuts = [bisect_left(starts, end) for end in stops[:-1]]
        bounds = np.maximum.accumulate([0, *cuts, len(one)])
        yield DocumentIds(np.array(one.ids, np.int64), np.diff(bounds))


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
    chunks: Iterable[RawChunk],
    tokenizer: tokenizers.Tokenizer,
    vocabulary: Vocabulary,
    reading: Reading,
    workers: int,
) -> Iterator[tuple[RawChunk, EncodedChunk]]:
    """Each chunk with its encoding, in order, by `workers` processes (1: this one)."""
    if workers > 1:
        yield from _in_processes(chunks, (tokenizer, vocabulary, reading), workers)
        return
    encoder = Encoder(tokenizer, vocabulary, reading)
    for chunk in chunks:
        yield chunk, encoder(chunk)


def _in_processes(
    chunks: Iterable[RawChunk], encoder: EncoderArguments, workers: int
) -> Iterator[tuple[RawChunk, EncodedChunk]]:
    # Forked from a process that has imported what they need and nothing more: this one may have
    # threads of the tokenizer library, which do not survive a fork.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(workers, context, _start_worker, encoder) as pool:
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


def _start_worker(
    tokenizer: tokenizers.Tokenizer, vocabulary: Vocabulary, reading: Reading
) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    _encoder = Encoder(tokenizer, vocabulary, reading)


def _end_with_the_parent() -> None:
    """A worker waits for work for ever; that its parent was killed it must find out itself."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(chunk: RawChunk) -> EncodedChunk:
    assert _encoder is not None
    return _encoder(chunk)


def _joined(arrays: list[NDArray], dtype: np.dtype) -> NDArray:
    return np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype, casting="unsafe")
