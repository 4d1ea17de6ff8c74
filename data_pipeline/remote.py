"""Files elsewhere: ``pipe:`` commands, through `webdataset`, and URLs, through `fsspec`."""

from __future__ import annotations

import io
import re
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

from data_pipeline.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import fsspec

PIPE = "pipe:"
BUFFER_BYTES = 1 << 20


def is_remote(path: str) -> bool:
    """Whether a name is a URL with ``://``, or a command whose output is read."""
    return path.startswith(PIPE) or re.match(r"[a-z][a-z0-9+]*://", path) is not None


def is_web(path: str) -> bool:
    """Whether a name is a URL of a web server."""
    return path.startswith(("http://", "https://"))


def is_store(path: str) -> bool:
    """Whether a URL is of a store that `fsspec` knows (``s3://``), but no web server or disk."""
    scheme, separator, _ = path.partition("://")
    if not separator or scheme in ("http", "https", "file") or path.startswith(PIPE):
        return False
    with suppress(ImportError):
        from fsspec.registry import known_implementations

        return scheme in known_implementations
    return False


def read_range(url: str, start: int, size: int) -> bytes:
    """`size` bytes of a file in a store, fewer at its end. Raises what its library raises."""
    system, name = file_system(url)
    return system.cat_file(name, start=start, end=start + size)


def name_of(path: str) -> Path:
    """The path whose suffix tells the format: none of a command, and without a query of a URL."""
    if path.startswith(PIPE):
        return Path()
    return Path(urlsplit(path).path if is_web(path) else path)


@contextmanager
def remote_errors(path: str) -> Iterator[None]:
    """Raise DataError, which names the file, for any error of the library that reads it."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())
        reason = words.removeprefix(path) or type(error).__name__
        raise DataError(f"{path}: cannot be read: {reason}") from error


def file_system(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a URL, and the path in it. Raises DataError where it is not installed."""
    try:
        import fsspec.core
    except ImportError as error:
        raise DataError(f"{url}: needs `pip install 'tandem-distill[remote]'`") from error
    with remote_errors(url):  # an error of an import names the package to install
        return fsspec.core.url_to_fs(url)


def open_remote(path: str, seeks: bool = False) -> BinaryIO:
    """The bytes of a file elsewhere, in order unless `seeks`.

    Raises DataError where it cannot be opened. A web server is asked for the file at once, since it
    may not send parts.
    """
    with remote_errors(path):
        if path.startswith(PIPE):
            import webdataset  # imports torch, which a build does not need

            return io.BufferedReader(_Output(webdataset.gopen(path)), BUFFER_BYTES)
        system, name = file_system(path)
        if seeks or not is_web(path):
            return system.open(name, "rb")
        return io.BufferedReader(system.open(name, "rb", block_size=0), BUFFER_BYTES)


def size_of(path: str) -> int | None:
    """The size in bytes of a file elsewhere; None where nobody tells it."""
    if path.startswith(PIPE):
        return None
    system, name = file_system(path)
    with remote_errors(path):
        return system.size(name)


def find_remote(name: str) -> tuple[list[str], bool]:
    """The URLs of the files that a URL names, sorted, and whether it names a folder of them.

    Globs are expanded, and hidden files of folders are left out. A command stands for itself.
    """
    if name.startswith(PIPE):
        return [name], False
    system, path = file_system(name)
    with remote_errors(name):
        if "*" in path:
            return sorted(map(system.unstrip_protocol, system.glob(path))), False
        if not name.endswith("/") and system.isfile(path):
            return [name], False
        files, start = system.find(path), len(path)
        if not files and is_web(path):  # `isfile` and `find` take any error for a no
            with suppress(FileNotFoundError):
                system.cat_file(path, end=1)
        urls = [system.unstrip_protocol(file) for file in files if "/." not in f"/{file[start:]}"]
        return sorted(urls), bool(files)


class _Output(io.RawIOBase):
    """The output of a command. Its end raises OSError where the command has failed."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size: int = self._pipe.stream.readinto1(buffer)
        if not size and (status := self._pipe.proc.wait()):
            raise OSError(f"the command has ended with status {status}")
        return size

    def close(self) -> None:
        if not self.closed:
            self._pipe.stream.close()  # before its end, a command is ended by SIGPIPE
            self._pipe.proc.wait()
        super().close()
