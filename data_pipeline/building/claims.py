"""Which files of a folder are ours: what an unfinished build claims, and what a corpus lists.

A build or merge writes the name of every file into ``.build/files`` before the file exists. So it
can prove later which ones it wrote: only these are ever replaced or removed, and anything else that
lies where it writes is refused by name before the first write.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.reading.corpus import SPLITS, WORD_STARTS, origin_of
from data_pipeline.shards import manifest
from data_pipeline.shards.index import shard_name
from data_pipeline.shards.kept import PATTERN, is_sound
from data_pipeline.shards.manifest import DIGESTS, MANIFEST, PART
from data_pipeline.shards.writing import disk_errors

JOURNAL = ".build"
LOCK, FILES = f"{JOURNAL}/lock", f"{JOURNAL}/files"
FOLDERS = (*SPLITS, "tokenizer", JOURNAL)
TOP_FILES = (MANIFEST, PART, WORD_STARTS, DIGESTS)


class Claims:
    """The files in `folder` that an unfinished build has written or is about to write."""

    def __init__(self, folder: Path) -> None:
        """Read those of an earlier process; nothing is written."""
        self._folder = folder
        self._names = set(_read(folder / FILES))

    def __contains__(self, path: Path) -> bool:
        """Whether a file in the folder is one of them, or an empty beginning of the journal."""
        name = str(path.relative_to(self._folder))
        if name == FILES:
            return bool(self._names) or not path.stat().st_size
        return name in self._names or (name == LOCK and not path.stat().st_size)

    def refuse_strangers(self) -> None:
        """Raise DataError, naming the first, for files that lie where a build writes."""
        for path in _there(self._folder):
            if path not in self:
                raise stranger(path)

    def add(self, *paths: Path) -> None:
        """Claim files that are about to be written. Raises DataError where one is another's."""
        names = [str(path.relative_to(self._folder)) for path in paths]
        new = [name for name in names if name not in self._names]
        for name in new:
            if os.path.lexists(self._folder / name):
                raise stranger(self._folder / name)
        if new:
            with disk_errors(self._folder / FILES), open(self._folder / FILES, "ab") as file:
                # A line may have been cut off there when a process was killed.
                file.write("".join(f"\n{_line(name)}\n" for name in new).encode())
                file.flush()
                os.fsync(file.fileno())
            self._names.update(new)

    def remove_files(self) -> None:
        """Remove what an earlier process wrote, but for its journal."""
        for name in self._names:
            if not name.startswith(f"{JOURNAL}/"):
                with disk_errors(self._folder / name):
                    (self._folder / name).unlink(missing_ok=True)

    def remove_journal(self) -> None:
        """Remove the journal, the claims last; a folder that holds more stays."""
        inside = [name for name in self._names if name.startswith(f"{JOURNAL}/")]
        for path in (self._folder / name for name in (*inside, LOCK, FILES)):
            if path.is_file() and path in self:
                path.unlink()
        remove_if_empty(self._folder / JOURNAL)


def stranger(path: Path) -> DataError:
    """The refusal of a file that is not ours to replace or remove."""
    return DataError(f"{path}: not written by this build; move it away, or use another folder")


def files_of_corpus(folder: Path) -> list[Path]:
    """The files of a finished corpus that are there, its manifest last.

    Which they are the manifest says, and the checksum in each kept sequence count. Raises DataError
    when the manifest is damaged.
    """
    tree = manifest.read(folder)
    found = [folder / name for name in tree["files"]]
    for split in SPLITS:
        count, origin = tree["splits"][split]["shards"], origin_of(manifest.files_of(tree), split)
        found += [folder / split / shard_name(number) for number in range(count)]
        found += [one for one in (folder / split).glob(PATTERN) if is_sound(one, origin)]
    return [path for path in found if path.exists()] + [folder / MANIFEST]


def refuse_strangers_in_corpus(folder: Path) -> None:
    """Raise DataError, naming it, for a file in a corpus's folder that is not the corpus's."""
    claims, own = Claims(folder), set(files_of_corpus(folder))
    for path in _there(folder):
        if path not in own and path not in claims:
            raise stranger(path)


def remove_corpus(folder: Path) -> None:
    """Remove the files of a corpus, and of its folders those that this leaves empty."""
    Claims(folder).remove_journal()
    for path in files_of_corpus(folder):
        path.unlink(missing_ok=True)
    for name in (*SPLITS, "tokenizer", "."):
        remove_if_empty(folder / name)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder unless something is in it, or it is not there."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _there(folder: Path) -> Iterator[Path]:
    """Every file that lies where a build writes."""
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
    """The names in a claims file; lines that are damaged or were cut off claim nothing."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return
    for line in text.split("\n"):
        name = line[9:]
        if line == _line(name):
            yield name
