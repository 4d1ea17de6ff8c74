"""Blocks on a node's own disk: copied there ahead of the ranks that will read them, then dropped.

What a node reads next is known (`BatchStream.blocks_entered`), so exactly that is copied: blocks of
about 1 MiB, not the shards around them, of which a row needs a block in thousands of steps. One
thread of one process of a node, the `Stager`, copies and drops; every rank of the node reads
through `Staged`. Nobody waits for it: what is not there is read from the corpus, and so is
everything when the disk is full or fails. A copy ends with the checksum that the index has of it.
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
from data_pipeline.shards.staged import Staged

STEPS_AHEAD = 10_000  # of the reader, at most
STEPS_BEHIND = 4  # by which another rank of the node may be behind the one that counts
PREFIX, LOCK = "tandem-staged-", ".lock"  # of the folders that are made here, and the file in each

_COPY = re.compile(r"shard-\d{6,}\.tar\.\d+(\.part)?")
_log = logging.getLogger(__name__)

Entered = list[tuple[CorpusSplit, int]]  # blocks that are read from a step on


@dataclass(frozen=True)
class _Copy:
    shards: Staged
    name: str
    offset: int
    bytes: int


class Stager:
    """Copies to this node's disk what its ranks are about to read, and drops what they have read.

    A context manager: its thread runs inside of it, and nothing is left on the disk afterwards.
    """

    def __init__(
        self, folder: Path, ahead: Iterable[tuple[int, Entered]], room: int, step: int
    ) -> None:
        """`ahead` gives, step after step, the blocks that are entered; the copies take at most
        `room` bytes in `folder`, to whose parent they belong. The reader begins at `step`."""
        self._folder, self._ahead, self._room = folder, ahead, room
        self._reached, self._closed = step, False
        self._bytes, self._copies = 0, 0
        self._needed: dict[_Copy, int] = {}  # the last step that reads it, as far as is known
        self._queue: list[tuple[int, int, _Copy]] = []  # a heap, the earliest need first
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="staging", daemon=True)

    def reached(self, step: int) -> None:
        """Say that the batch of `step` is about to be read."""
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
        _log.info("data.stage: %d blocks were copied to %s", self._copies, self._folder)

    def _run(self) -> None:
        try:
            remove_leftovers(self._folder.parent)
            with _made(self._folder):
                self._follow()
        except OSError as error:
            _log.warning(
                "data.stage: %s: %s; from here on this node reads from the corpus itself",
                error.filename or self._folder,
                error.strerror,
            )

    def _follow(self) -> None:
        for step, entered in self._ahead:
            for split, number in entered:
                if isinstance(split.shards, Staged):
                    self._stage(step, split, split.shards, number)
            if not self._may_go_on(step, 0):
                return

    def _stage(self, step: int, split: CorpusSplit, shards: Staged, number: int) -> None:
        record = split.index.blocks[number]
        name = shard_name(split.index.shard_of(number))
        copy = _Copy(shards, name, int(record["offset"]), int(record["bytes"]))
        known = copy in self._needed
        if copy.bytes > self._room or not self._may_go_on(step, 0 if known else copy.bytes):
            return
        if step <= self._reached:
            return  # the reader was here first
        if not known and not self._copy(copy, int(record["crc32"])):
            return
        self._needed[copy] = step
        heapq.heappush(self._queue, (step, id(copy), copy))

    def _copy(self, copy: _Copy, crc32: int) -> bool:
        """Whether there is a copy now; of a damaged block there is none: its reader will say so."""
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

    def _may_go_on(self, step: int, size: int) -> bool:
        """Wait until `step` is near enough and there is room; False when it is over."""
        with self._change:
            while not self._closed:
                self._drop_what_was_read()
                is_near = step <= self._reached + STEPS_AHEAD
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
    """The folder of one attempt at a run, below `stage`, in which ``$TMPDIR`` and its like may be.

    Raises DataError for a variable that is not set here.
    """
    path = os.path.expandvars(stage)
    if "$" in path:
        raise DataError(f"data.stage: {stage}: the variable is not set on this node")
    return Path(path) / f"{PREFIX}{key}"


def remove_leftovers(stage: Path) -> None:
    """Remove the copies of jobs that were killed: those of this user that nobody holds any more."""
    for folder in stage.glob(f"{PREFIX}*"):
        with suppress(OSError), open(folder / LOCK, "r+b") as lock:
            if os.fstat(lock.fileno()).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder)


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """A folder that is held by this process, and gone afterwards."""
    folder.mkdir(exist_ok=True)
    with open(folder / LOCK, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove the copies in a folder, and itself unless something else lies in it."""
    for part in folder.glob("*/*"):
        if _COPY.fullmatch(part.name):
            part.unlink(missing_ok=True)
    for inner in (*folder.glob("*/"), folder):
        (inner / LOCK).unlink(missing_ok=True)
        with suppress(OSError):
            inner.rmdir()
