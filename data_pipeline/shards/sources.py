"""Where the files of a corpus come from: a folder, or a URL behind a bounded local cache.

A URL is anything that ``webdataset.gopen`` opens: ``https://host/corpus``, ``pipe:ssh host cat
/corpus/{}``, ``file:/corpus``. File names are appended, or put in the place of ``{}``. The ranks
of a node share the cache: one fetches a file while the others wait for it, a file appears whole or
not at all, and the least recently used shards make room. What is being fetched counts in full.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import BadShard
from data_pipeline.shards.index import shard_number
from data_pipeline.shards.manifest import FileRecord, fault, sha256

ATTEMPTS = 5
FIRST_PAUSE = 0.5  # seconds, doubled after each failure
STALL_SECONDS = 60.0
CHUNK = 1 << 20


def is_url(path: str) -> bool:
    """Whether a corpus path is a URL rather than a folder."""
    return re.match(r"[a-z][a-z0-9+.-]+:", path) is not None


@dataclass(frozen=True)
class Folder:
    """Files of a local or shared file system."""

    root: Path

    def read(self, name: str, offset: int, size: int) -> bytes:
        """`size` bytes of a file, fewer at its end. Raises BadShard when it cannot be read."""
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
    """Files of a URL, verified by `shards`, the table of the index, or by the records of `files`.

    Up to `cache_bytes` of the shards are kept in `cache`."""

    url: str
    cache: Path
    cache_bytes: int
    shards: NDArray[np.void] | None = None
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    given_up: dict[str, str] = field(default_factory=dict)  # files that could not be had, and why

    def read(self, name: str, offset: int, size: int) -> bytes:
        """`size` bytes of a file, fewer at its end. Raises BadShard when it cannot be had."""
        for _ in range(ATTEMPTS):
            path = self.fetch(name)
            try:
                with open(path, "rb") as file:
                    os.utime(path)
                    file.seek(offset)
                    return file.read(size)
            except FileNotFoundError:
                continue  # another rank needed the room
        raise BadShard(f"{join(self.url, name)}: falls out of the cache at once; raise cache_gb")

    def fetch(self, name: str) -> Path:
        """The local copy of a file, fetched if need be. A file is given up once for all."""
        if name in self.given_up:
            raise BadShard(self.given_up[name])
        path = self.cache / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not self._has(name, path):
            with _alone(path):
                for left in path.parent.glob(f".{path.name}.*.part"):
                    left.unlink()  # by a process that died
                if not self._has(name, path):
                    self._fetch_with_retries(name, path)
        return path

    def _has(self, name: str, path: Path) -> bool:
        """Whether the cache has a file; one of the index must be as recorded."""
        return path.exists() and (name not in self.files or not fault(path, self.files[name]))

    def _fetch_with_retries(self, name: str, path: Path) -> None:
        address = join(self.url, name)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        for attempt in range(ATTEMPTS):
            try:
                self._reserve(name, part)
                copy(address, part)
                self._verify(name, part)
                part.rename(path)
                return
            except (OSError, ValueError) as error:
                part.unlink(missing_ok=True)
                reason = str(error)
            if attempt + 1 < ATTEMPTS:
                time.sleep(FIRST_PAUSE * 2**attempt)
        self.given_up[name] = f"{address}: cannot be fetched after {ATTEMPTS} attempts: {reason}"
        raise BadShard(self.given_up[name])

    def _verify(self, name: str, part: Path) -> None:
        expected = self._expected(name)
        if expected is None:
            return
        size = part.stat().st_size
        if size != expected.bytes:
            raise ValueError(f"{size} bytes came instead of {expected.bytes}")
        if sha256(part) != expected.sha256:
            raise ValueError("its SHA-256 is not that of the index")

    def _expected(self, name: str) -> FileRecord | None:
        """What the index or the manifest says of a file."""
        if self.shards is None:
            return self.files.get(name)
        record = self.shards[shard_number(name)]
        return FileRecord(int(record["bytes"]), record["sha256"].tobytes().hex())

    def _reserve(self, name: str, part: Path) -> None:
        """Make `part` as large as a shard will be, after removing what was used least recently."""
        expected = self._expected(name)
        if expected is None or self.shards is None:
            part.touch()
            return
        with _alone(self.cache.parent / "room"), open(part, "wb") as file:
            self._make_room(expected.bytes)
            file.truncate(expected.bytes)

    def _make_room(self, size: int) -> None:
        """Remove shards of this corpus until so many bytes more fit."""
        found = []
        for path in self.cache.parent.glob("*/*shard-*.tar*"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue  # another rank has finished or given it up
            found.append((stat.st_mtime_ns, stat.st_size, path))
        excess = sum(one[1] for one in found) + size - self.cache_bytes
        for _, bytes_, path in sorted(found):
            if excess <= 0:
                break
            if path.suffix == ".tar":
                path.unlink(missing_ok=True)
                excess -= bytes_


def join(url: str, name: str) -> str:
    """The address of a file of a corpus."""
    return url.replace("{}", name) if "{}" in url else f"{url.rstrip('/')}/{name}"


def copy(address: str, part: Path) -> None:
    """Copy a URL over a file. Raises OSError or ValueError, also when nothing comes any more."""
    import webdataset  # brings torch, which a build does not need

    stream = webdataset.gopen(address)
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
        raise ValueError(" ".join(str(state.error).split())) from state.error


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
    """End the process behind a stalled pipe: closing would wait for it."""
    process = getattr(stream, "proc", None)
    if process is not None:
        process.kill()


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes from working on `path` too; one that dies gives it free."""
    lock = path.with_name(f".{path.name}.lock")
    while True:
        with open(lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_same(lock, file):
                continue  # whoever had it before has removed it
            try:
                yield
            finally:
                lock.unlink()
            return


def _is_same(path: Path, file: IO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
