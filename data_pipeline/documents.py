"""Reading documents out of text files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from data_pipeline.errors import DataError


def find_files(inputs: Sequence[str]) -> list[Path]:
    """The files that `inputs` (files and folders) name, folders sorted by name."""
    found: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            found += sorted(p for p in path.rglob("*.txt") if p.is_file())
        elif path.is_file():
            found.append(path)
        else:
            raise DataError(f"{path}: no such file or folder")
    if not found:
        raise DataError(f"{', '.join(inputs)}: no .txt files there")
    return found


def read_documents(inputs: Sequence[str]) -> Iterator[str]:
    """The documents of the given files, in order."""
    for path in find_files(inputs):
        lines: list[str] = []
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.strip():
                    lines.append(line.rstrip())
                elif lines:
                    yield "\n".join(lines)
                    lines = []
        if lines:
            yield "\n".join(lines)
