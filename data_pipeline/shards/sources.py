"""The sources of a corpus's files: a folder, or a URL with a bounded local cache of whole shards.

A URL is anything that ``webdataset.gopen`` opens: ``https://host/corpus``, ``pipe:ssh host cat
/corpus/{}``, ``file:/corpus``; or that of a store, through `fsspec`: ``s3://bucket/corpus``.
A file name is appended to it, or replaces ``{}``. The ranks of a
node share the cache. One rank fetches a file while the others wait for it; on a file system without
locks each fetches it. A file appears in the cache complete or not at all. The least recently used
shards are removed to make room; a shard that is being fetched counts with its full size.
"""

import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import BadShard, DataError
from data_pipeline.remote import is_store, is_web, open_remote
from data_pipeline.shards.index import shard_number
from data_pipeline.shards.manifest import FileRecord, fault, sha256, unfinished_name

ATTEMPTS = 5
FIRST_PAUSE = 0.5  # seconds, doubled after each failure
# Causes for which a store cannot be opened that another attempt would meet too.
LASTING = (FileNotFoundError, PermissionError, ImportError)
STALL_SECONDS = 60.0
CHUNK = 1 << 20
_COMMAND_FAILED = re.compile(r": exit (\d+) \(read\)")  # in the words of `webdataset`
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def is_url(path: str) -> bool:
    """Whether a corpus path is a URL rather than a folder."""
    return re.match(r"[a-z][a-z0-9+.-]+:", path) is not None


@dataclass(frozen=True)
class Folder:
    """Files of a local or shared file system."""

    root: Path

    def read(self, name: str, offset: int, size: int) -> bytes:
        """`size` bytes of a file, fewer at its end. Raises BadShard if it cannot be read."""
        try:
            with open(self.root / name, "rb") as file:
                file.seek(offset)
                return file.read(size)
        except FileNotFoundError:
            raise BadShard(f"{self.root / name}: missing") from None
        except OSError as error:
            raise BadShard(f"{self.root / name}: cannot be read: {error.strerror}") from None


@dataclass(frozen=True)
class Remote:
    """Files of a URL, verified against `shards` (the table in the index) or the records `files`.

    Up to `cache_bytes` of shards are cached in `cache`.
    """

    url: str
    cache: Path
    cache_bytes: int
    shards: NDArray[np.void] | None = None
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # file -> why it cannot be fetched

    def read(self, name: str, offset: int, size: int) -> bytes:
        """`size` bytes of a file, fewer at its end. Raises BadShard if it cannot be fetched."""
        for _ in range(ATTEMPTS):
            path = self.fetch(name)
            try:
                with open(path, "rb") as file:
                    with suppress(OSError):  # of another user, who alone may say that it is used
                        os.utime(path)
                    file.seek(offset)
                    return file.read(size)
            except FileNotFoundError:
                continue  # another rank has removed it to make room
        raise BadShard(
            f"{join(self.url, name)}: is removed from the cache at once; raise data.cache_gb"
        )

    def fetch(self, name: str) -> Path:
        """The local copy of a file, fetched if necessary. A failed file is not tried again."""
        if name in self.failures:
            raise BadShard(self.failures[name])
        path = self.cache / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not self._is_cached(name, path):
            with _exclusive(path) as is_alone:
                for left in path.parent.glob(f".{path.name}.*.part") if is_alone else ():
                    left.unlink()  # left by a process that died
                if not self._is_cached(name, path):
                    self._fetch_with_retries(name, path)
        return path

    def _is_cached(self, name: str, path: Path) -> bool:
        """Whether the cache has a file; a file with a record must match it."""
        return path.exists() and (name not in self.files or not fault(path, self.files[name]))

    def _fetch_with_retries(self, name: str, path: Path) -> None:
        address = join(self.url, name)
        part = unfinished_name(path)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._reserve(name, part)
                copy(address, part)
                self._verify(name, part)
                part.rename(path)
                return
            except (OSError, ValueError, DataError) as error:
                part.unlink(missing_ok=True)
                reason = str(error).removeprefix(f"{address}: ")
                if isinstance(error, DataError) and isinstance(error.__cause__, LASTING):
                    break
            if attempt < ATTEMPTS:
                time.sleep(FIRST_PAUSE * 2 ** (attempt - 1))
        tries = f" after {attempt} attempts" if attempt > 1 else ""
        self.failures[name] = f"{address}: cannot be fetched{tries}: {reason}"
        raise BadShard(self.failures[name])

    def _verify(self, name: str, part: Path) -> None:
        expected = self._expected(name)
        if expected is None:
            return
        size = part.stat().st_size
        if size != expected.bytes:
            raise ValueError(f"received {size} bytes instead of {expected.bytes}")
        if sha256(part) != expected.sha256:
            raise ValueError("its SHA-256 differs from the one in the index")

    def _expected(self, name: str) -> FileRecord | None:
        """The record of a file in the index or the manifest."""
        if self.shards is None:
            return self.files.get(name)
        record = self.shards[shard_number(name)]
        return FileRecord(int(record["bytes"]), record["sha256"].tobytes().hex())

    def _reserve(self, name: str, part: Path) -> None:
        """Create `part` with the full size of a shard, after making room for it."""
        expected = self._expected(name)
        if expected is None or self.shards is None:
            part.touch()
            return
        with _exclusive(self.cache.parent / "room"), open(part, "wb") as file:
            self._make_room(expected.bytes)
            file.truncate(expected.bytes)

    def _make_room(self, size: int) -> None:
        """Remove the least recently used shards of this corpus until `size` more bytes fit."""
        shards = []
        for path in self.cache.parent.glob("*/*shard-*.tar*"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue  # another rank has renamed or removed it
            shards.append((stat.st_mtime_ns, stat.st_size, path))
        excess = sum(bytes_ for _, bytes_, _ in shards) + size - self.cache_bytes
        for _, bytes_, path in sorted(shards):
            if excess <= 0:
                break
            if path.suffix == ".tar":
                path.unlink(missing_ok=True)
                excess -= bytes_


def join(url: str, name: str) -> str:
    """The address of a file of a corpus."""
    return url.replace("{}", name) if "{}" in url else f"{url.rstrip('/')}/{name}"


def copy(address: str, part: Path) -> None:
    """Copy a URL to an existing file. Raises OSError or ValueError, also if the transfer stalls."""
    import webdataset  # imports torch, which a build does not need

    stream = open_remote(address) if is_store(address) else webdataset.gopen(address)
    state = _Progress()
    worker = threading.Thread(target=_pump, args=(stream, part, state), daemon=True)
    worker.start()
    seen, since = -1, time.monotonic()
    while worker.is_alive():
        worker.join(0.05)
        if state.bytes != seen:
            seen, since = state.bytes, time.monotonic()
        elif time.monotonic() - since > STALL_SECONDS:
            _abandon(stream)
            raise ValueError(f"stalled: no data for {STALL_SECONDS:g} s")
    if state.error is not None:
        words = " ".join(str(state.error).split())
        if status := _COMMAND_FAILED.search(words):
            command = "curl" if is_web(address) else "the command"
            words = f"{command} has ended with status {status[1]}"
        raise ValueError(words) from state.error


@dataclass
class _Progress:
    bytes: int = 0
    error: Exception | None = None


def _pump(stream: BinaryIO, part: Path, state: _Progress) -> None:
    try:
        with open(part, "r+b") as file:
            while data := stream.read(CHUNK):
                file.write(data)
                state.bytes += len(data)
            file.truncate()
        stream.close()
    except Exception as error:  # raised again by `copy`
        state.error = error


def _abandon(stream: BinaryIO) -> None:
    """Kill the process behind a stalled pipe; closing the pipe would wait for it."""
    process = getattr(stream, "proc", None)
    if process is not None:
        process.kill()


@contextmanager
def _exclusive(path: Path) -> Iterator[bool]:
    """Lock `path` against other processes; the lock is freed if this process dies.

    Yields False on a file system without locks, such as Lustre mounted without ``-o flock``.
    """
    lock = path.with_name(f".{path.name}.lock")
    while True:
        with open(lock, "w") as file:
            has_lock = _lock(file)
            if has_lock and not _is_same(lock, file):
                continue  # the previous holder has removed the lock file
            try:
                yield has_lock
            finally:
                lock.unlink(missing_ok=not has_lock)
            return


def _lock(file: IO[Any]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def _is_same(path: Path, file: IO[Any]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
