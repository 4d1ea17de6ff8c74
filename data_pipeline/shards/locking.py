"""Locks on folders: one process at a time writes a folder, and what dead ones left is removed."""

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import unfinished_name
from data_pipeline.shards.writing import disk_errors

YOUNG_S = 60.0  # an unfinished folder of this age may not have its lock yet
OLD_S = 86400.0  # without a lock, what is unfinished and has not changed for this long is left


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """A new hidden folder beside `path` for its unfinished content, removed when the block ends.

    Folders for the same path that dead processes left are removed, too. Raises OSError, which
    names `path`, where it cannot be made.
    """
    _remove_left(path)
    part = unfinished_name(path)
    try:  # from before the folder is there, as a signal may come at any time
        try:
            part.mkdir()
        except OSError as error:  # it is about `path`, which the user has named
            raise OSError(error.errno, error.strerror, str(path)) from None
        with _locked(part):
            yield part
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _remove_left(path: Path) -> None:
    """Remove unfinished folders whose writer is dead: nobody holds their lock.

    Those of version 0.1.0 had other names, and no lock.
    """
    locked = re.compile(rf"\.{re.escape(path.name)}\.[^/]+-\d+-[0-9a-f]{{8}}\.part")
    unlocked = re.compile(rf"\.{re.escape(path.name)}\.(\d+\.part|forking-[0-9a-f]{{8}})")
    with suppress(OSError):
        for part in [*path.parent.iterdir()]:
            age = time.time() - part.lstat().st_mtime
            if unlocked.fullmatch(part.name) and age > OLD_S:
                shutil.rmtree(part) if part.is_dir() else part.unlink()
            elif locked.fullmatch(part.name) and part.is_dir() and age > YOUNG_S:
                with _locked(part) as is_locked:
                    if is_locked:
                        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder for the block; False where another has it, or the file system has no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        except OSError:
            is_locked = False
        yield is_locked
    finally:
        os.close(descriptor)


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
