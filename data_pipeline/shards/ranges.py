"""Shards of which parts are read: on a web server that sends parts, or in a store such as S3.

A web server is asked by range requests (RFC 9110, section 14), a store through `fsspec`.

Only the blocks that a rank reads are sent, and none is kept: no cache is needed. Each is verified
by its checksum in the index, as in a folder.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from http.client import HTTPException

from data_pipeline.errors import BadShard, DataError
from data_pipeline.remote import is_store, read_range
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
    if not sources.is_web(address):
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
            data: bytes = answer.read()
            return data
    except urllib.error.HTTPError as error:
        if error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return b""  # the file ends before it
        raise
