"""Reading shards with copies of some blocks on this node's own disk."""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from data_pipeline.shards.ranges import Ranged
from data_pipeline.shards.sources import Folder

CHECKSUM_BYTES = 4

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Staged:
    """The shards of `source`; blocks with a copy in `folder` are read from there."""

    source: Folder | Ranged
    folder: Path
    _warned: set[str] = field(default_factory=set, compare=False)

    def read(self, name: str, offset: int, size: int) -> bytes:
        """`size` bytes of a file, fewer at its end. Raises BadShard if it cannot be read."""
        copied = self._copied(name, offset, size)
        return self.source.read(name, offset, size) if copied is None else copied

    def put(self, name: str, offset: int, data: bytes) -> None:
        """Write a copy of a block. Raises OSError."""
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
            stored = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self._warn(path, str(error.strerror))
            return None
        data, checksum = stored[:-CHECKSUM_BYTES], stored[-CHECKSUM_BYTES:]
        if len(data) != size or zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little") != checksum:
            self._warn(path, "damaged")
            return None
        return data

    def _warn(self, path: Path, reason: str) -> None:
        """Log once that the copies on this disk cannot be read."""
        if not self._warned:
            self._warned.add(reason)
            _log.warning("data.stage: %s: %s; reading from the corpus instead", path, reason)
