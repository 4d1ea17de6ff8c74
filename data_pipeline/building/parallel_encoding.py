"""Encoding by several processes, in order."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process

import tokenizers

from data_pipeline.building.encoding import EncodedChunk, Encoder
from data_pipeline.errors import DataError
from data_pipeline.text.documents import RawChunk, Reading
from data_pipeline.tokenization.tokenizer import Vocabulary

QUEUED_PER_WORKER = 4

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
        encoder = Encoder(*arguments)
        queue: deque[tuple[RawChunk, Future[EncodedChunk]]] = deque()
        try:
            for chunk in chunks:
                if not started.done():  # which takes as long as this process does a few chunks in
                    yield chunk, encoder(chunk)
                    continue
                queue.append((chunk, pool.submit(_work, chunk)))
                if len(queue) > (others + 1) * QUEUED_PER_WORKER:
                    yield _first_of(queue, encoder)
            while queue:
                yield _first_of(queue, encoder)
        except (BrokenProcessPool, BrokenPipeError):
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


def _first_of(
    queue: deque[tuple[RawChunk, Future[EncodedChunk]]], encoder: Encoder
) -> tuple[RawChunk, EncodedChunk]:
    """The first of a queue. Until that is done, this process does what no other has begun."""
    while not queue[0][1].done():
        waiting = next((at for at, (_, future) in enumerate(queue) if future.cancel()), None)
        if waiting is None:
            break
        chunk = queue[waiting][0]
        own: Future[EncodedChunk] = Future()
        own.set_result(encoder(chunk))
        queue[waiting] = chunk, own
    chunk, first = queue.popleft()
    return chunk, first.result()


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
