"""A lock on a folder, so that one process at a time writes it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.shards.writing import disk_errors


@contextmanager
def exclusive(folder: Path, refusal: str) -> Iterator[None]:
    """Create `folder` and lock it; the lock is freed if the process dies.

    Raises DataError, with this `refusal`, if another process holds the lock.
    """
    with disk_errors(folder / "lock"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)  # not inherited
    with open(lock, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(refusal) from None
        except OSError:
            pass  # the file system does not support locks
        yield
