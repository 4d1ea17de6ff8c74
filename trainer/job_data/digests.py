"""Digests of the files that examples are made of, and whether these stay as they were hashed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from data_pipeline import DataError
from data_pipeline.shards import manifest
from data_pipeline.text.text_files import refuse_pipe


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, or of the names and contents in a folder; DataError if unreadable."""
    refuse_pipe(path)
    try:
        if not path.is_dir():
            return manifest.sha256(path)
        files = sorted(file for file in path.rglob("*") if file.is_file())
        digests = [(str(file.relative_to(path)), manifest.sha256(file)) for file in files]
        return hashlib.sha256(json.dumps(digests).encode()).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def watch(paths: Iterable[Path]) -> Callable[[], None]:
    """A function that raises DataError for the first of these files that has changed since now.

    A file that was put back has changed, too: the time of an inode's last change cannot be set.
    """
    before = {path: _state_of(path) for path in paths}

    def require_unchanged() -> None:
        for path, state in before.items():
            if _state_of(path) != state:
                raise DataError(f"{path}: was changed while it was read; repeat the command")

    return require_unchanged


def _state_of(path: Path) -> list[tuple[str, int, int, int]]:
    """The inodes, sizes and times of change of a file, or of all files in a folder."""
    try:
        files = [file for file in sorted(path.rglob("*")) if file.is_file()]
        states = [(str(file), file.stat()) for file in (files if path.is_dir() else [path])]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return [(name, state.st_ino, state.st_size, state.st_ctime_ns) for name, state in states]
