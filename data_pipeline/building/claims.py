"""Which files of a folder Tandem wrote: the claims of an unfinished build, the list of a corpus.

A build or merge claims each file: it writes the name into ``.build/files`` before it creates the
file. Only claimed files are ever replaced or removed. Any other file in a place where the build
writes is "foreign": the build refuses it by name before its first write.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.building.near_duplicates import LIST, SIGNATURES
from data_pipeline.errors import DataError
from data_pipeline.reading.corpus import SPLITS, WORD_STARTS, index_digest
from data_pipeline.shards import manifest
from data_pipeline.shards.cached_counts import PATTERN, is_intact
from data_pipeline.shards.index import shard_name
from data_pipeline.shards.manifest import DIGESTS, MANIFEST, PART
from data_pipeline.shards.writing import disk_errors

JOURNAL = ".build"
LOCK, FILES = f"{JOURNAL}/lock", f"{JOURNAL}/files"
FOLDERS = (*SPLITS, "tokenizer", JOURNAL)
TOP_FILES = (MANIFEST, PART, WORD_STARTS, DIGESTS, SIGNATURES, LIST)


class Claims:
    """The files in `folder` that an unfinished build has written or is about to write."""

    def __init__(self, folder: Path) -> None:
        """Read the claims of an earlier process; writes nothing."""
        self._folder = folder
        self._names = set(_read(folder / FILES))

    def __contains__(self, path: Path) -> bool:
        """Whether a file is claimed, or is a journal file that is still empty."""
        name = str(path.relative_to(self._folder))
        if name == FILES:
            return bool(self._names) or not path.stat().st_size
        return name in self._names or (name == LOCK and not path.stat().st_size)

    def refuse_foreign_files(self) -> None:
        """Raise DataError for the first unclaimed file in a place where a build writes."""
        for path in _existing_files(self._folder):
            if path not in self:
                raise foreign_file_error(path)

    def add(self, *paths: Path) -> None:
        """Claim files before they are created. Raises DataError if one exists unclaimed."""
        names = [str(path.relative_to(self._folder)) for path in paths]
        new = [name for name in names if name not in self._names]
        for name in new:
            if os.path.lexists(self._folder / name):
                raise foreign_file_error(self._folder / name)
        if new:
            with disk_errors(self._folder / FILES), open(self._folder / FILES, "ab") as file:
                # The leading line feed ends a line that a killed process left incomplete.
                file.write("".join(f"\n{_line(name)}\n" for name in new).encode())
                file.flush()
                os.fsync(file.fileno())
            self._names.update(new)

    def remove_files(self) -> None:
        """Remove the files that an earlier process wrote, except for its journal."""
        for name in self._names:
            if not name.startswith(f"{JOURNAL}/"):
                with disk_errors(self._folder / name):
                    (self._folder / name).unlink(missing_ok=True)

    def remove_journal(self) -> None:
        """Remove the journal, its list of claims last, and its folder if that is then empty."""
        inside = [name for name in self._names if name.startswith(f"{JOURNAL}/")]
        for path in (self._folder / name for name in (*inside, LOCK, FILES)):
            if path.is_file() and path in self:
                path.unlink()
        remove_if_empty(self._folder / JOURNAL)


def foreign_file_error(path: Path) -> DataError:
    """The error for a file that this build did not write and must not replace or remove."""
    return DataError(f"{path}: not written by this build; move it away, or use another folder")


def files_of_corpus(folder: Path) -> list[Path]:
    """The existing files of a finished corpus, its manifest last.

    The manifest lists them. A cached sequence count belongs to the corpus if its checksum fits.
    Raises DataError if the manifest is damaged.
    """
    tree = manifest.read(folder)
    files = [folder / name for name in tree["files"]]
    for split in SPLITS:
        count, origin = (
            tree["splits"][split]["shards"],
            index_digest(manifest.files_of(tree), split),
        )
        files += [folder / split / shard_name(number) for number in range(count)]
        files += [path for path in (folder / split).glob(PATTERN) if is_intact(path, origin)]
    return [path for path in files if path.exists()] + [folder / MANIFEST]


def refuse_foreign_files_in_corpus(folder: Path) -> None:
    """Raise DataError for the first file that lies where a corpus does but is not part of it."""
    claims, of_corpus = Claims(folder), set(files_of_corpus(folder))
    for path in _existing_files(folder):
        if path not in of_corpus and path not in claims:
            raise foreign_file_error(path)


def remove_corpus(folder: Path) -> None:
    """Remove the files of a corpus, then its folders that are empty."""
    Claims(folder).remove_journal()
    for path in files_of_corpus(folder):
        path.unlink(missing_ok=True)
    for name in (*SPLITS, "tokenizer", "."):
        remove_if_empty(folder / name)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder if it exists and is empty."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _existing_files(folder: Path) -> Iterator[Path]:
    """Every existing file in a place where a build writes."""
    for name in (*TOP_FILES, *FOLDERS):
        path = folder / name
        if path.is_dir() and name in FOLDERS:
            for parent, _, names in os.walk(path):
                yield from (Path(parent) / inside for inside in sorted(names))
        elif os.path.lexists(path):
            yield path


def _line(name: str) -> str:
    return f"{zlib.crc32(name.encode()):08x} {name}"


def _read(path: Path) -> Iterator[str]:
    """The names in a claims file; damaged and incomplete lines are ignored."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return
    for line in text.split("\n"):
        name = line[9:]
        if line == _line(name):
            yield name
