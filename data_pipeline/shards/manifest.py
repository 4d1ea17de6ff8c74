"""``corpus.json``, the manifest: a description of the corpus, the size and SHA-256 of its files.

The manifest covers the index, and the index covers the shards. The manifest ends with a SHA-256 of
itself, so everything that decides what a step reads can be verified. Files of up to `SMALL` bytes
are verified whenever a corpus is opened. Larger files are verified by ``tandem data check`` and,
block by block, as they are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs.durable import while_unchanged
from data_pipeline.errors import DataError

MANIFEST, PART = "corpus.json", ".corpus.json.part"
DIGESTS = "digests.bin"  # the digests of a part's documents, for the merge
FORMAT = 2
SMALL = 64 << 20
CHUNK = 1 << 22
REPAIR_ADVICE = "restore it from a copy, or build the corpus again"


@dataclass(frozen=True)
class FileRecord:
    """The size and SHA-256 of a file when it was written."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRecord:
        """The record of a file as it is now."""
        return cls(path.stat().st_size, sha256(path))


def records(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The records of files in `folder` as plain values, for the manifest."""
    return {name: asdict(FileRecord.of(folder / name)) for name in names}


def files_of(tree: Mapping[str, Any]) -> dict[str, FileRecord]:
    """The records in a manifest, by name."""
    return {name: FileRecord(**record) for name, record in tree["files"].items()}


def render(tree: Mapping[str, Any]) -> str:
    """The text of a manifest with the content `tree`."""
    digest = hashlib.sha256(json.dumps(tree).encode()).hexdigest()
    return json.dumps({**tree, "sha256": digest}, indent=2) + "\n"


def parse(text: bytes, name: str) -> dict[str, Any]:
    """The content of a manifest. Raises DataError, naming it `name`, if it is damaged."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        raise DataError(f"{name}: damaged: not JSON; {REPAIR_ADVICE}") from None
    if not isinstance(tree, dict) or "format" not in tree:
        raise DataError(f"{name}: not the manifest of a corpus; {REPAIR_ADVICE}")
    if tree["format"] != FORMAT:
        raise DataError(
            f"{name}: has another format ({tree['format']}, not {FORMAT}); "
            "build the corpus again, in another folder"
        )
    tree.pop("sha256", None)
    if render(tree).encode() != text:
        raise DataError(f"{name}: damaged: its SHA-256 does not match; {REPAIR_ADVICE}")
    return tree


def read(folder: Path) -> dict[str, Any]:
    """The content of the manifest in `folder`. Raises DataError if it is missing or damaged."""
    path = folder / MANIFEST
    try:
        return parse(path.read_bytes(), str(path))
    except FileNotFoundError:
        if not folder.exists():
            here = "" if folder.is_absolute() else f" in {Path.cwd()}"
            raise DataError(
                f"{folder}: no such corpus{here}; build one with `tandem data build`"
                + (", or start in the folder that the path is relative to" if here else "")
            ) from None
        raise DataError(
            f"{folder}: not a finished corpus (no {MANIFEST}); run `tandem data build` on it"
        ) from None
    except NotADirectoryError:
        raise DataError(f"{folder}: is a file; a corpus is a folder") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def fault(path: Path, record: FileRecord, reads: bool = True) -> str | None:
    """The fault of a file, or None. Without `reads` only its size is checked."""
    try:
        size = path.stat().st_size
        if size != record.bytes:
            return f"{size} bytes instead of {record.bytes}"
        if reads and sha256(path) != record.sha256:
            return f"its SHA-256 differs from the one in {MANIFEST}"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


_remembered_fault = while_unchanged(fault)


def verify(folder: Path, files: Mapping[str, FileRecord], up_to: float = SMALL) -> None:
    """Raise DataError for the first file that does not match its record.

    For files larger than `up_to` bytes only the size is checked. A process hashes each file at most
    once while the file is unchanged.
    """
    for name, record in files.items():
        path = folder / name
        wrong = fault(path, record, reads=False)
        if wrong is None and record.bytes <= up_to:
            wrong = _remembered_fault(path, record)
        if wrong is not None:
            raise DataError(f"{path}: {wrong}; {REPAIR_ADVICE}")


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(CHUNK):
            digest.update(data)
    return digest.hexdigest()


def unfinished_name(path: Path) -> Path:
    """A hidden name beside `path` for its unfinished content, which no other process has.

    Containers that share a folder may have equal process ids, and equal host names.
    """
    writer = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
    return path.with_name(f".{path.name}.{writer}.part")
