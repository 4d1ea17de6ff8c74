"""Reading from a corpus of which some blocks have a copy on this node's own disk."""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from data_pipeline.shards.sources import Folder

CHECKSUM_BYTES = 4

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Staged:
    """The shards of `source`, of which some blocks are in `folder`, on this node's own disk."""

    source: Folder
    folder: Path
    _said: set[str] = field(default_factory=set, compare=False)

    def read(self, name: str, offset: int, size: int) -> bytes:
        """`size` bytes of a file, fewer at its end. Raises BadShard when it cannot be read."""
        copied = self._copied(name, offset, size)
        return self.source.read(name, offset, size) if copied is None else copied

    def put(self, name: str, offset: int, data: bytes) -> None:
        """Keep a copy of a block. Raises OSError."""
        path = self._path(name, offset)
        part = path.with_name(f"{path.name}.part")
        with open(part, "wb") as file:
            file.write(data)
            file.write(zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little"))
        part.rename(path)

    def drop(self, name: str, offset: int) -> None:
        """Remove the copy of a block."""
        self._path(name, offset).unlink(missing_ok=True)

    def _path(self, name: str, offset: int) -> Path:
        return self.folder / f"{name}.{offset}"

    def _copied(self, name: str, offset: int, size: int) -> bytes | None:
        path = self._path(name, offset)
        try:
            found = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._warn(path, str(error.strerror))
            return None
        data, checksum = found[:-CHECKSUM_BYTES], found[-CHECKSUM_BYTES:]
        if len(data) != size or zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little") != checksum:
            self._warn(path, "not as it was written")
            return None
        return data

    def _warn(self, path: Path, reason: str) -> None:
        """Say once that this disk fails."""
        if not self._said:
            self._said.add(reason)
            _log.warning("data.stage: %s: %s; read from the corpus instead", path, reason)
