"""Staging: blocks are copied to a node's own disk before its ranks read them, then dropped.

`BatchStream.blocks_entered` says which blocks a node reads next, and only these are copied. A block
has about 1 MiB; a row reads one block of a shard in thousands of steps, so whole shards are not
copied. One thread on each node, the `Stager`, copies and drops. The node's ranks read through
`Staged` and never wait: a block without a copy is read from the corpus. If the disk is full or
fails, all blocks are. A copy ends with its CRC-32.
"""

from __future__ import annotations

import fcntl
import heapq
import logging
import os
import re
import threading
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import BadShard, DataError
from data_pipeline.reading.corpus import CorpusSplit
from data_pipeline.shards.index import shard_name
from data_pipeline.shards.ranges import Staged

STEPS_AHEAD = 10_000  # how far, at most, the stager runs ahead of the reader
STEPS_BEHIND = 4  # how far another rank of the node may be behind the reporting one
PREFIX, LOCK = "tandem-staged-", ".lock"  # of a staging folder's name; the lock file inside it

_COPY = re.compile(r"shard-\d{6,}\.tar\.\d+(\.part)?")
_log = logging.getLogger(__name__)

Entered = list[tuple[CorpusSplit, int]]  # the blocks that rows begin to read at a step


@dataclass(frozen=True)
class _Copy:
    shards: Staged
    name: str
    offset: int
    bytes: int


class Stager:
    """Copies blocks to this node's disk before its ranks read them, and drops them afterwards.

    A context manager: its thread runs inside the context. On exit all copies are removed.
    """

    def __init__(
        self, folder: Path, ahead: Iterable[tuple[int, Entered]], room: int, step: int
    ) -> None:
        """`ahead` yields (step, blocks that rows begin to read at it). The reader begins at `step`.

        Copies lie in `folder` and take at most `room` bytes.
        """
        self._folder, self._ahead, self._room = folder, ahead, room
        self._reached, self._closed = step, False
        self._bytes, self._copies = 0, 0
        self._needed: dict[_Copy, int] = {}  # the last known step at which rows begin to read it
        self._queue: list[tuple[int, int, _Copy]] = []  # a heap, the earliest step first
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="staging", daemon=True)

    def reached(self, step: int) -> None:
        """Report that the batch of `step` is about to be read."""
        with self._change:
            self._reached = step
            self._change.notify()

    def __enter__(self) -> Stager:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join()
        _log.info("data.stage: copied %d blocks to %s", self._copies, self._folder)

    def _run(self) -> None:
        try:
            remove_leftovers(self._folder.parent)
            with _locked_folder(self._folder):
                self._follow()
        except OSError as error:
            why = f"data.stage: {error.filename or self._folder}: {error.strerror}"
            _log.warning("%s; from now on this node reads from the corpus", why)
        except DataError as error:
            _log.warning("%s; this node reads from the corpus", error)

    def _follow(self) -> None:
        for step, entered in self._ahead:
            for split, number in entered:
                if isinstance(split.shards, Staged):
                    self._stage(step, split, split.shards, number)
            if not self._wait_until_due(step):
                return

    def _stage(self, step: int, split: CorpusSplit, shards: Staged, number: int) -> None:
        record = split.index.blocks[number]
        name = shard_name(split.index.shard_of(number))
        copy = _Copy(shards, name, int(record["offset"]), int(record["bytes"]))
        if copy.bytes > self._room or not self._wait_until_due(step, copy):
            return
        if step <= self._reached:
            return  # too late: the reader is there already
        if copy not in self._needed and not self._copy(copy, int(record["crc32"])):
            return
        self._needed[copy] = step
        heapq.heappush(self._queue, (step, id(copy), copy))

    def _copy(self, copy: _Copy, crc32: int) -> bool:
        """Copy a block; False if it is damaged. The rank that reads it reports the damage."""
        try:
            data = copy.shards.source.read(copy.name, copy.offset, copy.bytes)
        except BadShard:
            return False
        if zlib.crc32(data) != crc32:
            return False
        copy.shards.folder.mkdir(exist_ok=True)
        copy.shards.put(copy.name, copy.offset, data)
        self._bytes += copy.bytes
        self._copies += 1
        return True

    def _wait_until_due(self, step: int, copy: _Copy | None = None) -> bool:
        """Wait until `step` is near enough, and there is room for `copy` or it is there already.

        It may be dropped meanwhile. False after the context has ended.
        """
        with self._change:
            while not self._closed:
                self._drop_what_was_read()
                is_near = step <= self._reached + STEPS_AHEAD
                size = 0 if copy is None or copy in self._needed else copy.bytes
                if step <= self._reached or (is_near and self._bytes + size <= self._room):
                    return True
                self._change.wait()
            return False

    def _drop_what_was_read(self) -> None:
        while self._queue and self._queue[0][0] < self._reached - STEPS_BEHIND:
            step, _, copy = heapq.heappop(self._queue)
            if self._needed.get(copy) == step:
                del self._needed[copy]
                copy.shards.drop(copy.name, copy.offset)
                self._bytes -= copy.bytes


def stage_folder(stage: str, key: str) -> Path:
    """The staging folder of one attempt at a run. `stage` may hold variables such as ``$TMPDIR``.

    Raises DataError for a variable that is not set, or empty, on this node.
    """
    path = os.path.expanduser(os.path.expandvars(stage))
    if not path or "$" in path:
        raise DataError(
            f"data.stage: {stage} names a variable that is not set on this node; set it, or name "
            "a folder"
        )
    return Path(path) / f"{PREFIX}{key}"


def remove_leftovers(stage: Path) -> None:
    """Remove the copies of killed jobs: folders of this user that no process has locked."""
    for folder in stage.glob(f"{PREFIX}*"):
        with suppress(OSError), open(folder / LOCK, "r+b") as lock:
            if os.fstat(lock.fileno()).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Create and lock a folder; remove it on exit.

    Raises DataError on a file system without locks.
    """
    folder.mkdir(exist_ok=True)
    with open(folder / LOCK, "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise DataError(
                f"data.stage: {folder} cannot be locked ({error.strerror}); name a folder on the "
                "node's own disk"
            ) from None
        try:
            yield
        finally:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove the copies in a folder, then the folder if it is empty."""
    for part in folder.glob("*/*"):
        if _COPY.fullmatch(part.name):
            part.unlink(missing_ok=True)
    for inner in (*filter(Path.is_dir, folder.glob("*")), folder):
        (inner / LOCK).unlink(missing_ok=True)
        with suppress(OSError):
            inner.rmdir()
