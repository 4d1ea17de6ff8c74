"""Atomic, fsynced writes of files, and what is remembered of files that have not changed."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, wraps
from pathlib import Path
from typing import BinaryIO, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def atomic_write(path: Path, content: bytes | str) -> None:
    """Replace a file's content with `content` (text as UTF-8).

    A reader sees either the old or the new content, also after a power loss.

    Raises:
        OSError: names `path`, whichever call failed.
    """
    with atomic_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Replace a file's content with what the block writes, as `atomic_write` does.

    The old content stays, alone, where the block raises; an OSError of the block names `path` too.
    """
    beside = path.with_name(f"{path.name}.new")
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        fsync(path.parent)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def while_unchanged(
    read: Callable[Concatenate[Path, P], R],
) -> Callable[Concatenate[Path, P], R]:
    """A decorator: a file is read again only if its inode, size or times have changed.

    The arguments must be hashable. Raises OSError where the file is missing.
    """

    @lru_cache(maxsize=4096)
    def remembered(_: tuple[int, ...], path: Path, /, *rest: P.args, **options: P.kwargs) -> R:
        return read(path, *rest, **options)

    @wraps(read)
    def reading(path: Path, /, *rest: P.args, **options: P.kwargs) -> R:
        status = os.stat(path)
        state = status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        return remembered(state, path, *rest, **options)  # type: ignore[arg-type]

    return reading


def fsync(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
