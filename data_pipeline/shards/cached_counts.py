"""Arrays in ``.npy`` files: mapped, or computed once from a split's index and cached beside it.

A cache file is an ordinary ``.npy`` followed by 32 bytes: the SHA-256 of the index digest, the file
name and the npy bytes. Each writer renames a complete file into place, checksum included, so
processes may race to write it. The checksum reveals a file that is damaged, belongs to another
corpus or was renamed; such a file is computed again.
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import CHUNK, unfinished_name


def map_array(path: Path) -> NDArray:
    """The one-dimensional array in a file, memory-mapped and read-only.

    Raises DataError, naming the file, if it is missing or holds anything else.
    """
    try:
        array = _mapped(path)
    except FileNotFoundError:
        raise DataError(f"{path}: missing; build the corpus again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # any exception: the header is parsed as a Python literal
        raise DataError(f"{path}: not an array: {' '.join(str(error).split())[:200]}") from None
    if array.ndim != 1:
        raise DataError(f"{path}: has {array.ndim} dimensions instead of one; build again")
    return array


def _mapped(path: Path) -> NDArray:
    """Map the array in a file as `np.load` does, but open the file once, not three times.

    Where thousands of ranks start, each open is a request to the file system.
    """
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"version {version} of the format")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        if dtype.hasobject:
            raise ValueError("it holds Python objects")
        return np.memmap(file, dtype, "r", file.tell(), shape)


_log = logging.getLogger(__name__)

PATTERN = "sequences-*.npy"
DIGEST_BYTES = 32

_unsaved: dict[tuple[Path, str], NDArray] = {}  # what this process could not write, by its origin


def cached_array(path: Path, origin: str, size: int, compute: Callable[[], NDArray]) -> NDArray:
    """The array of `size` numbers at `path`, memory-mapped; computed and kept if not intact.

    `origin` identifies the data that it is computed from.
    """
    kept = kept_array(path, origin, size)
    if kept is not None:
        return kept
    fresh = compute()
    keep_array(path, origin, fresh)
    return fresh


def kept_array(path: Path, origin: str, size: int) -> NDArray | None:
    """The array of `size` numbers that was kept; None where there is none, or it is damaged."""
    if (path, origin) in _unsaved:
        return _unsaved[path, origin]
    if not path.exists():
        return None
    if is_intact(path, origin):
        array = map_array(path)
        if array.shape == (size,):
            return array
    _log.warning("%s: damaged; computed again", path)
    return None


def keep_array(path: Path, origin: str, array: NDArray) -> None:
    """Write an array to `path`; where that fails, remember it until this process ends."""
    if not _save(path, array, origin):
        _unsaved[path, origin] = array


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


def _save(path: Path, array: NDArray, origin: str) -> bool:
    """Whether the array could be written."""
    content = io.BytesIO()
    np.save(content, array)
    digest = _begun(path, origin)
    digest.update(content.getbuffer())
    part = unfinished_name(path)
    try:
        part.write_bytes(content.getvalue() + digest.digest())
        part.replace(path)
    except OSError:
        with suppress(OSError):  # a read-only file system has no file to remove
            part.unlink()
        return False
    return True
