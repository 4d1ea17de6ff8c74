"""Arrays that are computed once from the index of a split, and cached beside it.

A cache file is an ordinary ``.npy`` followed by 32 bytes: the SHA-256 of the index digest, the file
name and the npy bytes. Each writer renames a complete file into place, checksum included, so
processes may race to write it. The checksum reveals a file that is damaged, belongs to another
corpus or was renamed; such a file is computed again.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.shards.arrays import map_array
from data_pipeline.shards.manifest import CHUNK

_log = logging.getLogger(__name__)

PATTERN = "sequences-*.npy"
DIGEST_BYTES = 32


def cached_array(path: Path, origin: str, size: int, compute: Callable[[], NDArray]) -> NDArray:
    """The array of `size` numbers at `path`, memory-mapped; computed and written if not intact.

    `origin` identifies the data that it is computed from. If the folder is not writable, the next
    process computes the array again.
    """
    if path.exists():
        if is_intact(path, origin):
            found = map_array(path)
            if found.shape == (size,):
                return found
        _log.warning("%s: damaged; computed again", path)
    fresh = compute()
    _save(path, fresh, origin)
    return fresh


def is_intact(path: Path, origin: str) -> bool:
    """Whether a cache file is undamaged and belongs to this name and origin."""
    try:
        status = path.stat()
        state = status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        return _remembered(path, origin, state)
    except OSError:
        return False


@lru_cache(maxsize=256)
def _remembered(path: Path, origin: str, state: tuple[int, ...]) -> bool:
    """`is_intact`, remembered for as long as the file has this inode, size and times."""
    size = state[1] - DIGEST_BYTES
    digest = _begun(path, origin)
    with open(path, "rb") as file:
        while size > 0 and (data := file.read(min(CHUNK, size))):
            digest.update(data)
            size -= len(data)
        return size == 0 and file.read() == digest.digest()


def _begun(path: Path, origin: str) -> hashlib._Hash:
    return hashlib.sha256(f"{origin} {path.name} ".encode())


def _save(path: Path, array: NDArray, origin: str) -> None:
    content = io.BytesIO()
    np.save(content, array)
    digest = _begun(path, origin)
    digest.update(content.getbuffer())
    part = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.part")
    try:
        part.write_bytes(content.getvalue() + digest.digest())
        part.replace(path)
    except OSError:
        with suppress(OSError):  # a read-only file system has no file to remove
            part.unlink()
