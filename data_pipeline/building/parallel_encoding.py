"""Encoding chunks in several processes, in order."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process

import tokenizers

from data_pipeline.building.encoding import EncodedChunk, Encoder
from data_pipeline.errors import DataError
from data_pipeline.text.documents import RawChunk
from data_pipeline.text.formats import ReadOptions
from data_pipeline.tokenization.tokenizer import Vocabulary

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
                "--workers: a tokenizing process died, perhaps out of memory; run the same command "
                "again with fewer --workers"
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


def _start_worker(
    tokenizer: tokenizers.Tokenizer,
    vocabulary: Vocabulary,
    reading: ReadOptions,
    signs: bool,
    also: Sequence[tokenizers.Tokenizer],
) -> None:
    global _encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _encoder = Encoder(tokenizer, vocabulary, reading, signs, also)


def _exit_with_parent() -> None:
    """End this worker when its parent dies; otherwise it would wait for work for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(chunk: RawChunk) -> EncodedChunk:
    assert _encoder is not None
    return _encoder(chunk)
