"""Encoding by several processes, in order."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process

import tokenizers

from data_pipeline.building.encoding import EncodedChunk, Encoder
from data_pipeline.errors import DataError
from data_pipeline.text.documents import RawChunk, Reading
from data_pipeline.tokenization.tokenizer import Vocabulary

QUEUED_PER_WORKER = 4
HANDED_OUT_PER_WORKER = 2  # one at work, and one to go on with

EncoderArguments = tuple[tokenizers.Tokenizer, Vocabulary, Reading]


def encode_all(
    chunks: Iterable[RawChunk],
    tokenizer: tokenizers.Tokenizer,
    vocabulary: Vocabulary,
    reading: Reading,
    workers: int,
) -> Iterator[tuple[RawChunk, EncodedChunk]]:
    """Each chunk with its encoding, in order, by `workers` processes, of which this is one."""
    if workers > 1:
        yield from _with_others(chunks, (tokenizer, vocabulary, reading), workers - 1)
        return
    encoder = Encoder(tokenizer, vocabulary, reading)
    for chunk in chunks:
        yield chunk, encoder(chunk)


def _with_others(
    chunks: Iterable[RawChunk], arguments: EncoderArguments, others: int
) -> Iterator[tuple[RawChunk, EncodedChunk]]:
    # Forked from a process that has imported what they need and nothing more: this one may have
    # threads of the tokenizer library, which do not survive a fork.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with (
        ThreadPoolExecutor(1) as starter,
        ProcessPoolExecutor(others, context, _start_worker, arguments) as pool,
    ):
        started = starter.submit(_start, pool, others)
        queue = _Queue(pool, others, Encoder(*arguments))
        try:
            for chunk in chunks:
                if not started.done():  # which takes as long as this process does a few chunks in
                    yield chunk, queue.encoder(chunk)
                    continue
                queue.add(chunk)
                if len(queue.chunks) > (others + 1) * QUEUED_PER_WORKER:
                    yield queue.first()
            while queue.chunks:
                yield queue.first()
        except (BrokenProcessPool, BrokenPipeError):
            started.exception()  # the pool does not end a process that began after it broke
            for process in active_children():
                process.kill()
            raise DataError(
                "a tokenizing process died, perhaps out of memory; run the same command again "
                "with fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _start(pool: ProcessPoolExecutor, processes: int) -> None:
    """Start the processes of a pool, from a thread of its own. The call returns when they exist."""
    # These inherit that an interrupt is not for them: they end with the one that they work for.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    for _ in range(processes):
        pool.submit(os.getpid)


@dataclass
class _Chunk:
    """A chunk in the order of the text, and who encodes it: another process, or nobody yet."""

    raw: RawChunk
    encoded: Future[EncodedChunk] | None = None


class _Queue:
    """Chunks in order; the pool always has the next few of them, this process the rest.

    A future is never cancelled: where a process of a pool dies, a cancelled one would end the
    pool's own thread, and the others would never be done.
    """

    def __init__(self, pool: ProcessPoolExecutor, others: int, encoder: Encoder) -> None:
        self.pool, self.encoder = pool, encoder
        self.chunks: deque[_Chunk] = deque()
        self.handed_out = others * HANDED_OUT_PER_WORKER

    def add(self, raw: RawChunk) -> None:
        """Another chunk of the text."""
        self.chunks.append(_Chunk(raw))
        self.hand_out()

    def hand_out(self) -> None:
        """Give the others their next chunks."""
        begun = [chunk.encoded for chunk in self.chunks if chunk.encoded is not None]
        free = self.handed_out - sum(not encoded.done() for encoded in begun)
        waiting = (chunk for chunk in self.chunks if chunk.encoded is None)
        for chunk in itertools.islice(waiting, max(free, 0)):
            chunk.encoded = self.pool.submit(_work, chunk.raw)

    def first(self) -> tuple[RawChunk, EncodedChunk]:
        """The first chunk. Until it is done, this process encodes what no other has begun."""
        first = self.chunks[0]
        while not (first.encoded and first.encoded.done()):
            waiting = next((chunk for chunk in self.chunks if chunk.encoded is None), None)
            if waiting is None:
                break
            waiting.encoded = Future()
            waiting.encoded.set_result(self.encoder(waiting.raw))
            self.hand_out()
        assert first.encoded is not None
        self.chunks.popleft()
        return first.raw, first.encoded.result()


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
