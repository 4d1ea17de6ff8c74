"""Encoding raw text, in one or several processes, into token ids and boundaries."""

import hashlib
import itertools
import os
import signal
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from operator import attrgetter
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from data_pipeline.building.near_duplicates import Signer
from data_pipeline.errors import DataError, as_data_errors
from data_pipeline.shards.blocks import OtherTokens, offsets, token_dtype
from data_pipeline.text.documents import Problem, RawChunk, parse
from data_pipeline.text.formats import ReadOptions
from data_pipeline.text.sentences import sentence_ends
from data_pipeline.tokenization.alignment import Aligner
from data_pipeline.tokenization.comparison import LossCounter, NormalizationLoss
from data_pipeline.tokenization.tokenizer import Vocabulary
from data_pipeline.tokenization.word_encoding import DocumentIds, WordEncoder

DIGEST_BYTES = 16
LOOKUP_TOKENS = 4096
ENCODING_FAILED = "tokenizer: fails on this text; check its files for damage"


@dataclass(frozen=True)
class EncodedChunk:
    """The tokenized documents of a chunk. Documents without tokens are problems instead."""

    tokens: NDArray[np.integer]  # [tokens]
    sentences: NDArray[np.uint16]  # [sentences] tokens of each
    documents: NDArray[np.uint32]  # [documents] sentences of each
    digests: list[bytes]  # of the text of each document
    problems: list[Problem]
    characters: int
    loss: NormalizationLoss  # what the normalizer removed from them
    records: NDArray[np.void] | None  # [documents] `RECORD`s, where near-duplicates are dropped
    others: list[tuple[OtherTokens, ...]]  # of each document, by each of the other tokenizers


class Encoder:
    """Encodes raw chunks with one tokenizer."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        vocabulary: Vocabulary,
        reading: ReadOptions,
        signs: bool,
        also: Sequence[tokenizers.Tokenizer] = (),
    ) -> None:
        """`also` are further tokenizers that read the same text."""
        self._tokenizer = tokenizer
        self._loss = LossCounter(tokenizer)
        self._words = WordEncoder(tokenizer)
        self._dtype = token_dtype(vocabulary.vocab_size)
        self._reading = reading
        self._sign = Signer() if signs else None
        self._align = Aligner(tokenizer, also)

    def __call__(self, chunk: RawChunk) -> EncodedChunk:
        """Encode the documents of a chunk; sentences without tokens are dropped."""
        parsed = parse(chunk, self._reading)
        with as_data_errors(ENCODING_FAILED, also=None):
            encoded = list(self._encode(parsed.documents))
            by_others = self._align(parsed.documents)
        has_tokens = [len(document.tokens) > 0 for document in encoded]
        documents = [*itertools.compress(encoded, has_tokens)]
        texts = [*itertools.compress(parsed.documents, has_tokens)]
        places = [chunk.problem(position, "no token in it") for position in parsed.positions]
        empty = [place for place, has in zip(places, has_tokens, strict=True) if not has]
        places = [*itertools.compress(places, has_tokens)]
        sentences = _joined([document.sentences for document in documents], np.dtype(np.uint16))
        full = sentences > 0
        before = offsets([len(document.sentences) for document in documents])
        return EncodedChunk(
            tokens=_joined([document.tokens for document in documents], self._dtype),
            sentences=sentences[full],
            documents=np.diff(offsets(full)[before]).astype(np.uint32),
            digests=[digest(text) for text in texts],
            problems=sorted([*parsed.problems, *empty], key=attrgetter("position")),
            characters=sum(map(len, texts)),
            loss=self._loss(texts),
            records=self._sign(texts, places) if self._sign else None,
            others=[*itertools.compress(by_others, has_tokens)],
        )

    def _encode(self, documents: list[str]) -> Iterator[DocumentIds]:
        """The ids of each document."""
        ends = [*map(sentence_ends, documents)]
        by_words = self._words(documents, ends)
        rest = [number for number, ids in enumerate(by_words) if ids is None]
        others = encode_whole(
            self._tokenizer, [documents[at] for at in rest], [ends[at] for at in rest]
        )
        for ids in by_words:
            yield next(others) if ids is None else ids


def encode_whole(
    tokenizer: tokenizers.Tokenizer, documents: list[str], ends: list[list[int]]
) -> Iterator[DocumentIds]:
    """The ids of each document, encoded whole; sentence ends are mapped to token offsets."""
    encoded = tokenizer.encode_batch(documents, add_special_tokens=False)
    for encoding, text, stops in zip(encoded, documents, ends, strict=True):
        cuts = _cuts_by_lookup(encoding, text, stops) if len(encoding) <= LOOKUP_TOKENS else None
        if cuts is None:
            starts = [start for start, _ in encoding.offsets]
            cuts = [bisect_left(starts, end) for end in stops[:-1]]
        bounds = np.maximum.accumulate([0, *cuts, len(encoding)])
        yield DocumentIds(np.array(encoding.ids, np.int64), np.diff(bounds))


def _cuts_by_lookup(encoded: tokenizers.Encoding, text: str, ends: list[int]) -> list[int] | None:
    """The first token of each sentence but the first; None if the tokenizer dropped its text.

    Each lookup makes the library scan the document. In a short document all lookups together take
    a fifth of the time of the list of all offsets.
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
        cuts.append(token + (place[0] < end))  # a token across the end belongs before it
    return cuts


def digest(document: str) -> bytes:
    """A 16-byte digest of a document's text; it does not depend on the tokenizer."""
    return hashlib.blake2b(document.encode(), digest_size=DIGEST_BYTES).digest()


def held_out(document_digest: bytes, val_fraction: float) -> bool:
    """Whether a document belongs to the validation split; a pure function of its text."""
    return int.from_bytes(document_digest[:8], "little") < val_fraction * 2.0**64


def _joined(arrays: list[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *arrays], dtype=dtype, casting="unsafe")


QUEUED_PER_WORKER = 4
IN_FLIGHT_PER_WORKER = 2  # one being encoded, and the next one

EncoderArguments = tuple[  # of `Encoder`
    tokenizers.Tokenizer, Vocabulary, ReadOptions, bool, Sequence[tokenizers.Tokenizer]
]


def encode_all(
    chunks: Iterable[RawChunk], arguments: EncoderArguments, workers: int
) -> Iterator[tuple[RawChunk, EncodedChunk]]:
    """Chunks with their encodings, in order. `workers` counts this process too."""
    if workers > 1:
        yield from _encode_in_parallel(chunks, arguments, workers - 1)
        return
    encoder = Encoder(*arguments)
    for chunk in chunks:
        yield chunk, encoder(chunk)


def _encode_in_parallel(
    chunks: Iterable[RawChunk], arguments: EncoderArguments, others: int
) -> Iterator[tuple[RawChunk, EncodedChunk]]:
    # Workers are forked from a server that has only imported modules. This process may have threads
    # of the tokenizer library, which do not survive a fork.
    context = get_context("forkserver")
    # The program that runs now, or its entry, decides where modules of this name are imported from.
    context.set_forkserver_preload(["__main__", "tandem", __name__])
    with (
        ThreadPoolExecutor(1) as starter,
        ProcessPoolExecutor(others, context, _start_worker, arguments) as pool,
    ):
        started = starter.submit(_start, pool, others)
        queue = _Queue(pool, others, Encoder(*arguments))
        try:
            for chunk in chunks:
                if not started.done():  # meanwhile this process encodes a few chunks by itself
                    yield chunk, queue.encoder(chunk)
                    continue
                queue.add(chunk)
                if len(queue.chunks) > (others + 1) * QUEUED_PER_WORKER:
                    yield queue.first()
            while queue.chunks:
                yield queue.first()
        except (BrokenProcessPool, BrokenPipeError):
            started.exception()  # wait: the pool does not end processes that start after it broke
            for process in active_children():
                process.kill()
            raise DataError(
                "a tokenizing process died, perhaps out of memory; run the same command again with "
                "fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _start(pool: ProcessPoolExecutor, processes: int) -> None:
    """Start the processes of a pool; returns when they exist. Runs in a thread of its own."""
    # The workers inherit the blocked SIGINT: they end when their parent does, not by Ctrl-C.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    for _ in range(processes):
        pool.submit(os.getpid)


@dataclass
class _Chunk:
    """A chunk and the future of its encoding; None if nobody has started on it."""

    raw: RawChunk
    encoded: Future[EncodedChunk] | None = None


class _Queue:
    """Chunks in order. The next few are submitted to the pool; this process encodes the rest.

    A future is never cancelled. When a worker dies, a cancelled future would end the pool's own
    thread, and the other futures would never be done.
    """

    def __init__(self, pool: ProcessPoolExecutor, others: int, encoder: Encoder) -> None:
        self.pool, self.encoder = pool, encoder
        self.chunks: deque[_Chunk] = deque()
        self.in_flight = others * IN_FLIGHT_PER_WORKER

    def add(self, raw: RawChunk) -> None:
        """Append a chunk."""
        self.chunks.append(_Chunk(raw))
        self.submit_next()

    def submit_next(self) -> None:
        """Submit waiting chunks to the pool, up to `in_flight` at a time."""
        begun = [chunk.encoded for chunk in self.chunks if chunk.encoded is not None]
        free = self.in_flight - sum(not encoded.done() for encoded in begun)
        waiting = (chunk for chunk in self.chunks if chunk.encoded is None)
        for chunk in itertools.islice(waiting, max(free, 0)):
            chunk.encoded = self.pool.submit(_work, chunk.raw)

    def first(self) -> tuple[RawChunk, EncodedChunk]:
        """Pop the first chunk. Until it is encoded, this process encodes waiting chunks."""
        first = self.chunks[0]
        while not (first.encoded and first.encoded.done()):
            waiting = next((chunk for chunk in self.chunks if chunk.encoded is None), None)
            if waiting is None:
                break
            waiting.encoded = Future()
            waiting.encoded.set_result(self.encoder(waiting.raw))
            self.submit_next()
        assert first.encoded is not None
        self.chunks.popleft()
        return first.raw, first.encoded.result()


_encoder: Encoder | None = None  # set in worker processes


def _start_worker(*arguments: Any) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _encoder = Encoder(*arguments)


def _exit_with_parent() -> None:
    """End this worker when its parent dies; otherwise it would wait for work for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(chunk: RawChunk) -> EncodedChunk:
    assert _encoder is not None
    return _encoder(chunk)
