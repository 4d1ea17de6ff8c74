"""A file that only grows, written by a process that may be killed at any byte."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import DataError

CHUNK = 1 << 22


@dataclass
class Growth:
    """How much of a file counts, and the CRC-32 of that. What was written beyond is dropped."""

    size: int = 0
    crc32: int = 0

    def append(self, path: Path, data: bytes) -> None:
        """Write `data` behind what counts, and count it."""
        with open(path, "ab") as file:
            file.truncate(self.size)
            file.write(data)
        self.size += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)

    def verify(self, path: Path, advice: str) -> None:
        """Raise DataError with the `advice` unless what counts is as it was written."""
        if (self.size, self.crc32) != _prefix(path, self.size):
            raise DataError(f"{path}: not as the unfinished build left it; {advice}")


def _prefix(path: Path, size: int) -> tuple[int, int]:
    """How many of the first `size` bytes of a file there are, and their CRC-32."""
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
