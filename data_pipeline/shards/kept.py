"""Arrays that are computed from the index of a split once, and kept beside it.

Such a file is an ordinary ``.npy`` with 32 bytes behind it: the SHA-256 of what it was computed
from, its name and its npy bytes. It is one file, so processes that race to write it each rename a
whole one into place, checksum included. A file that is damaged, of another corpus, or under
another's name is told by its checksum, and computed anew.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.shards.manifest import CHUNK

_log = logging.getLogger(__name__)

PATTERN = "sequences-*.npy"
DIGEST_BYTES = 32


def kept(path: Path, origin: str, size: int, compute: Callable[[], NDArray]) -> NDArray:
    """The array of `size` numbers at `path`, mapped; computed and written where it is not sound.

    `origin` stands for what it is computed from. A folder that cannot be written to only means
    that the next process computes it again.
    """
    if path.exists():
        if is_sound(path, origin):
            found: NDArray = np.load(path, mmap_mode="r", allow_pickle=False)
            if found.shape == (size,):
                return found
        _log.warning("%s: damaged; computed again", path)
    fresh = compute()
    _save(path, fresh, origin)
    return fresh


def is_sound(path: Path, origin: str) -> bool:
    """Whether a kept file is as it was written, for this name and origin."""
    try:
        status = path.stat()
        state = status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        return _remembered(path, origin, state)
    except OSError:
        return False


@lru_cache(maxsize=256)
def _remembered(path: Path, origin: str, state: tuple[int, ...]) -> bool:
    """Whether the file is sound while it has this inode, size and times."""
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
        part.unlink(missing_ok=True)
