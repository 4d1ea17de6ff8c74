"""``corpus.json``: what a corpus is, and the size and SHA-256 of each of its files.

Shards are not among them: the index has theirs, and the manifest has the index's. The manifest
ends with a SHA-256 of itself, so that whatever decides what a step reads can be verified. Files of
up to `SMALL` bytes are verified whenever a corpus is opened, larger ones by ``tandem data check``
and, block by block, as they are read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from data_pipeline.errors import DataError

MANIFEST, PART = "corpus.json", ".corpus.json.part"
DIGESTS = "digests.bin"  # of a part's documents, for the merge
FORMAT = 2
SMALL = 64 << 20
CHUNK = 1 << 22
MEND = "restore it from a copy, or build the corpus again"


@dataclass(frozen=True)
class FileRecord:
    """What a file was when it was written."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """That of a file as it is now."""
        return cls(path.stat().st_size, sha256(path))


def records(folder: Path, names: Iterable[str]) -> dict[str, dict]:
    """The records of files of `folder` as plain values, for the manifest."""
    return {name: asdict(FileRecord.of(folder / name)) for name in names}


def files_of(tree: Mapping) -> dict[str, FileRecord]:
    """The records in a manifest, by name."""
    return {name: FileRecord(**one) for name, one in tree["files"].items()}


def render(tree: Mapping) -> str:
    """The text of a manifest that holds `tree`."""
    digest = hashlib.sha256(json.dumps(tree).encode()).hexdigest()
    return json.dumps({**tree, "sha256": digest}, indent=2) + "\n"


def parse(text: bytes, name: str) -> dict:
    """What a manifest holds. Raises DataError, naming it `name`, unless it is as it was written."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        raise DataError(f"{name}: damaged: not JSON; {MEND}") from None
    if not isinstance(tree, dict) or "format" not in tree:
        raise DataError(f"{name}: not the manifest of a corpus; {MEND}")
    if tree["format"] != FORMAT:
        raise DataError(
            f"{name}: of another format ({tree['format']}, not {FORMAT}); "
            "build the corpus again, in another folder"
        )
    tree.pop("sha256", None)
    if render(tree).encode() != text:
        raise DataError(f"{name}: damaged: its SHA-256 is not its own; {MEND}")
    return tree


def read(folder: Path) -> dict:
    """What the manifest in `folder` holds. Raises DataError when it is missing or damaged."""
    path = folder / MANIFEST
    try:
        return parse(path.read_bytes(), str(path))
    except FileNotFoundError:
        if not folder.exists():
            raise DataError(
                f"{folder}: no such corpus; build one with `tandem data build`"
            ) from None
        raise DataError(
            f"{folder}: not a finished corpus (no {MANIFEST}); run `tandem data build` on it"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def fault(path: Path, record: FileRecord, reads: bool = True) -> str | None:
    """What is wrong with a file, None where it is as recorded; by its size alone unless `reads`."""
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"{size} bytes instead of {record.bytes}"
        if reads and sha256(path) != record.sha256:
            return f"its SHA-256 is not that of {MANIFEST}"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def verify(folder: Path, files: Mapping[str, FileRecord], up_to: float = SMALL) -> None:
    """Raise DataError, naming the file, unless each is as recorded, as far as can be told.

    Those of more than `up_to` bytes are told by their size. A process reads no file twice for this.
    """
    for name, record in files.items():
        path = folder / name
        wrong = fault(path, record, reads=False)
        if wrong is None and record.bytes <= up_to:
            status = os.stat(path)
            state = status.st_ino, status.st_mtime_ns, status.st_ctime_ns
            wrong = _remembered_fault(path, record, state)
        if wrong is not None:
            raise DataError(f"{path}: {wrong}; {MEND}")


@lru_cache(maxsize=4096)
def _remembered_fault(path: Path, record: FileRecord, state: tuple[int, ...]) -> str | None:
    """`fault` of the file while it has this inode and these times."""
    return fault(path, record)


def sha256(path: Path) -> str:
    """Of a file's contents, as hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(CHUNK):
            digest.update(data)
    return digest.hexdigest()
