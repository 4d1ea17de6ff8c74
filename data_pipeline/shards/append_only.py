"""An append-only file, written by a process that may be killed at any byte."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import DataError

CHUNK = 1 << 22


@dataclass
class CommittedPrefix:
    """The valid prefix of a file: its size and CRC-32. Bytes after it are discarded."""

    size: int = 0
    crc32: int = 0

    def append(self, path: Path, data: bytes) -> None:
        """Write `data` after the prefix and extend the prefix by it."""
        with open(path, "ab") as file:
            file.truncate(self.size)
            file.write(data)
        self.size += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)

    def verify(self, path: Path, advice: str) -> None:
        """Raise DataError, with the `advice`, if the prefix was changed."""
        if (self.size, self.crc32) != _prefix(path, self.size):
            raise DataError(f"{path}: was changed since the unfinished build; {advice}")


def _prefix(path: Path, size: int) -> tuple[int, int]:
    """(number of bytes, CRC-32) of the first `size` bytes of a file; fewer if it is shorter."""
    found = crc = 0
    try:
        with open(path, "rb") as file:
            while data := file.read(min(CHUNK, size - found)):
                found, crc = found + len(data), zlib.crc32(data, crc)
    except FileNotFoundError:
        return 0, 0
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return found, crc
