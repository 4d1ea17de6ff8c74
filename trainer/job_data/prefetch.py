"""Prefetching: a thread prepares the next batch while the current one is trained on."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from data_pipeline import Batch


class Prefetched:
    """Calls `read(step)` for consecutive steps, one step ahead.

    `waited`: the seconds that `take` has waited so far, which training lost to reading.
    """

    def __init__(self, read: Callable[[int], Batch], step: int) -> None:
        self._read, self._step, self.waited = read, step, 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: Future[Batch] = self._thread.submit(read, step)

    def take(self) -> Batch:
        """The batch of the next step; raises what `read` raised."""
        began = time.monotonic()
        batch = self._next.result()
        self.waited += time.monotonic() - began
        self._step += 1
        self._next = self._thread.submit(self._read, self._step)
        return batch

    def close(self) -> None:
        """Stop reading."""
        self._thread.shutdown(wait=True, cancel_futures=True)
