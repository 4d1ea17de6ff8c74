"""Opening text files, plain or compressed."""

import bz2
import gzip
import io
import lzma
import os
import select
import stat
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from data_pipeline.errors import DataError
from data_pipeline.remote import PIPE, is_remote, name_of, open_remote, size_of

STDIN = "-"
LONGEST_WINDOW = 1 << 31  # bytes, as of `zstd --long=31`; the library itself stops at 128 MiB
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_PACKED = {
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ\x00": ".xz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"PK\x03\x04": ".zip",
}
PAUSE_SECONDS = 0.02  # a writer that has nothing for so long awaits answers to what it has written


def suffix_of(path: str) -> str:
    """The suffix in small letters, without that of a compression: ``.tsv`` of ``train.TSV.xz``.

    Of an archive, the suffix of the file in it.
    """
    name = name_of(path)
    if name.suffix.lower() == ".zip" and (is_remote(path) or name.is_file()):
        return Path(_member(path)[1]).suffix.lower()
    return (name.with_suffix("") if name.suffix.lower() in COMPRESSED else name).suffix.lower()


def files_in(folder: str) -> list[Path]:
    """The files in a folder and in its folders, sorted, each path beginning with that of `folder`.

    Names that begin with a dot are left out, and so is what is in such folders: an archive of macOS
    has a ``._x.jsonl`` beside ``x.jsonl``, which is no text. Pipes, broken links and links to
    folders are in the list, so that whoever opens them says why they are not read. Raises DataError
    for a folder that cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}")

    files = []
    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        files += [Path(place, name) for name in links + names if not name.startswith(".")]
    return sorted(files)


def is_plain(path: str) -> bool:
    """Whether a file is uncompressed and on disk, so that `seek` works."""
    is_stream = path == STDIN or is_remote(path)
    return not is_stream and Path(path).suffix.lower() not in COMPRESSED


def file_size(path: str) -> int | None:
    """The size of a file in bytes, as it is stored; None of a stream."""
    if path == STDIN:
        return None
    return size_of(path) if is_remote(path) else os.path.getsize(path)


def refuse_pipe(path: str | Path) -> None:
    """Raise DataError for a named pipe: it may have no writer, and is read only once."""
    if Path(path).is_fifo():
        raise DataError(f"{path}: is a pipe; write its content to a file, or give - to read stdin")


def open_text(path: str) -> BinaryIO:
    """The uncompressed bytes of a file. Raises DataError where it cannot be read, or is a pipe."""
    try:
        if path == STDIN:
            return _standard_input(sys.stdin.buffer)
        file = open_bytes(path)
        if path.startswith(PIPE):  # the output of a command has no name
            head = file.peek(4) if isinstance(file, io.BufferedReader) else b""
            return _unpacked(path, file, packing_of(head))
        return _unpacked(path, file, name_of(path).suffix.lower())
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def open_bytes(path: str, seeks: bool = False) -> BinaryIO:
    """The bytes of a file as they are stored. Raises OSError, or DataError of one elsewhere."""
    if is_remote(path):
        return open_remote(path, seeks)
    refuse_pipe(path)
    return open(path, "rb")


def packing_of(head: bytes) -> str | None:
    """The suffix that the content of a compressed file asks for."""
    return next((suffix for start, suffix in _PACKED.items() if head.startswith(start)), None)


def _unpacked(path: str, file: BinaryIO, suffix: str | None) -> BinaryIO:
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    if suffix == ".bz2":
        return bz2.BZ2File(file)  # type: ignore[return-value]
    if suffix == ".xz":
        return lzma.LZMAFile(file)  # type: ignore[return-value]
    if suffix == ".zst":
        return _open_zst(path, file)
    if suffix == ".zip":
        file.close()
        return _open_zip(path)
    return file


def awaits_writer(path: str) -> bool:
    """Whether the next read of standard input would wait for its writer; never so of a file."""
    if path != STDIN:
        return False
    file = _standard_input(sys.stdin.buffer)
    if file.closed or not isinstance(file, io.BufferedReader):
        return False
    return isinstance(file.raw, _Pollable) and file.raw.is_quiet(file)


@lru_cache(maxsize=1)
def _standard_input(file: BinaryIO) -> BinaryIO:
    """The bytes of a pipe or a terminal, in a file of which `awaits_writer` can tell."""
    try:
        is_live = not stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except OSError:  # no file: a test's input
        return file
    return io.BufferedReader(_Pollable(file.raw)) if is_live else file  # type: ignore[attr-defined]


class _Pollable(io.RawIOBase):
    """A stream that can be asked whether it has anything to read."""

    def __init__(self, file: io.RawIOBase) -> None:
        self._file = file
        self._polls = self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """None where `is_quiet` asks and nothing has come; else it waits for a byte or the end."""
        if not select.select([self._file], [], [], PAUSE_SECONDS if self._polls else None)[0]:
            return None
        size = 0 if self._ended else self._file.readinto(buffer)
        self._ended = size == 0  # a terminal would be asked again
        return int(size)

    def is_quiet(self, buffered: io.BufferedReader) -> bool:
        """Whether neither the buffer above the stream nor the stream has a byte now."""
        self._polls = True
        try:
            return not buffered.peek(1)
        finally:
            self._polls = False


@contextmanager
def decompressing(path: str) -> Iterator[None]:
    """Raise DataError, which names the file, where its bytes cannot be read or decompressed."""
    try:
        yield
    except DataError:
        raise
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error, zipfile.BadZipFile) as error:
        what = "decompressed" if name_of(path).suffix.lower() in COMPRESSED else "read"
        raise DataError(f"{path}: cannot be {what}: {error}") from None
    except Exception as error:  # ZstdError derives from Exception alone
        if type(error).__name__ == "ZstdError":
            raise DataError(f"{path}: cannot be decompressed: {error}") from None
        if not is_remote(path):
            raise
        raise DataError(f"{path}: cannot be read: {error or type(error).__name__}") from None


def _open_zip(path: str) -> BinaryIO:
    archive, name = _member(path)
    try:
        return archive.open(name)  # type: ignore[return-value]
    except (RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: cannot be decompressed: {error}") from None


def _member(path: str) -> tuple[zipfile.ZipFile, str]:
    """An archive and its only file; hidden ones and those that macOS adds do not count."""
    try:
        archive = zipfile.ZipFile(open_bytes(path, seeks=True))
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: cannot be decompressed: {error}") from None
    names = [name for name in archive.namelist() if _is_content(name)]
    if len(names) != 1:
        first = f": {', '.join(names[:3])}" if names else ""
        raise DataError(f"{path}: must hold one file, and holds {len(names)}{first}; unpack it")
    return archive, names[0]


def _is_content(name: str) -> bool:
    parts = name.split("/")
    return bool(parts[-1]) and not any(part.startswith(".") or part == "__MACOSX" for part in parts)


def _open_zst(path: str, file: BinaryIO) -> BinaryIO:
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{path}: reading .zst needs `pip install zstandard`") from None
    context = zstandard.ZstdDecompressor(max_window_size=LONGEST_WINDOW)
    return io.BufferedReader(_Zstd(file, context))


class _Zstd(io.RawIOBase):
    """The contents of a .zst file with any number of frames.

    Unlike the library's own reader, it raises EOFError when the last frame is truncated.
    """

    def __init__(self, file: BinaryIO, context: Any) -> None:
        self._file, self._context = file, context
        self._frame: Any = None  # the decoder of the frame that is being read
        self._packed = self._plain = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._plain:
            self._packed = self._packed or self._file.read(1 << 17)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("the last frame is cut off")
                return 0
            self._frame = self._frame or self._context.decompressobj()
            self._plain = self._frame.decompress(self._packed)
            self._packed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        size = min(len(buffer), len(self._plain))
        buffer[:size], self._plain = self._plain[:size], self._plain[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def without_surrogates(text: str) -> str:
    """The text with a ? for each lone surrogate, which is no text and has no UTF-8.

    They come from JSON escapes and command lines.
    """
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
