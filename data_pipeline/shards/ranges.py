"""Shards of which parts are read: from a web server, a store such as S3, or this node's copies.

A web server is asked by range requests (RFC 9110, section 14), a store through `fsspec`.

Only the blocks that a rank reads are sent, and none is kept: no cache is needed. Each is verified
by its checksum in the index, as in a folder.
"""

import logging
import time
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path

from data_pipeline.errors import BadShard, DataError
from data_pipeline.remote import is_store, is_web, read_range
from data_pipeline.shards import sources

PASSING = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)  # of a client's errors


@dataclass(frozen=True)
class Ranged:
    """Files of a URL of a web server or store, of which the requested bytes are sent."""

    url: str

    def read(self, name: str, offset: int, size: int) -> bytes:
        """`size` bytes of a file, fewer at its end. Raises BadShard if they cannot be had."""
        return _read(sources.join(self.url, name), offset, size)


@lru_cache(maxsize=1024)
def serves_ranges(address: str) -> bool:
    """Whether this is a file in a store, or on a web server that sends parts of it."""
    if is_store(address):
        return True
    if not is_web(address):
        return False
    try:
        return len(_read(address, 0, 1)) == 1
    except BadShard:
        return False


def _read(address: str, offset: int, size: int) -> bytes:
    reason = ""
    for attempt in range(sources.ATTEMPTS):
        if attempt:
            time.sleep(sources.FIRST_PAUSE * 2 ** (attempt - 1))
        try:
            if is_store(address):
                return read_range(address, offset, size)
            return _request(address, offset, size)
        except BadShard:
            raise
        except (FileNotFoundError, PermissionError, DataError) as error:
            reason = str(error) or type(error).__name__
            break
        except urllib.error.HTTPError as error:
            reason = str(error)
            if error.code < HTTPStatus.INTERNAL_SERVER_ERROR and error.code not in PASSING:
                break
        except Exception as error:
            if not isinstance(error, OSError | HTTPException) and not is_store(address):
                raise  # a store's library has errors of its own
            reason = str(error) or type(error).__name__
    raise BadShard(f"{address}: cannot be read: {' '.join(reason.split())}")


def _request(address: str, offset: int, size: int) -> bytes:
    part = {"Range": f"bytes={offset}-{offset + size - 1}"}
    request = urllib.request.Request(address, headers=part)
    try:
        with urllib.request.urlopen(request, timeout=sources.STALL_SECONDS) as answer:
            if answer.status != HTTPStatus.PARTIAL_CONTENT:
                raise BadShard(f"{address}: the server sends whole files only")
            return answer.read()
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return b""  # the file ends before it
        raise


CHECKSUM_BYTES = 4

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Staged:
    """The shards of `source`; blocks with a copy in `folder` are read from there."""

    source: sources.Folder | Ranged
    folder: Path
    _warned: set[str] = field(default_factory=set, compare=False)

    def read(self, name: str, offset: int, size: int) -> bytes:
        """`size` bytes of a file, fewer at its end. Raises BadShard if it cannot be read."""
        copied = self._copied(name, offset, size)
        return self.source.read(name, offset, size) if copied is None else copied

    def put(self, name: str, offset: int, data: bytes) -> None:
        """Write a copy of a block. Raises OSError."""
        path = self._path(name, offset)
        part = path.with_name(f"{path.name}.part")
        with open(part, "wb") as file:
            file.write(data)
            file.write(zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little"))
        part.rename(path)

    def drop(self, name: str, offset: int) -> None:
        """Remove the copy of a block."""
        self._path(name, offset).unlink(missing_ok=True)

    def _path(self, name: str, offset: int) -> Path:
        return self.folder / f"{name}.{offset}"

    def _copied(self, name: str, offset: int, size: int) -> bytes | None:
        path = self._path(name, offset)
        try:
            stored = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._warn(path, str(error.strerror))
            return None
        data, checksum = stored[:-CHECKSUM_BYTES], stored[-CHECKSUM_BYTES:]
        if len(data) != size or zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little") != checksum:
            self._warn(path, "damaged")
            return None
        return data

    def _warn(self, path: Path, reason: str) -> None:
        """Log once that the copies on this disk cannot be read."""
        if not self._warned:
            self._warned.add(reason)
            _log.warning("data.stage: %s: %s; reading from the corpus instead", path, reason)
