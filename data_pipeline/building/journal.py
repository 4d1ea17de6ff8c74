"""The files that a build or merge claims, and the journal from which it resumes.

A build or merge claims each file: it writes the name into ``.build/files`` before it creates the
file. Only claimed files are ever replaced or removed. Any other file in a place where the build
writes is "foreign": the build refuses it by name before its first write.

``state.npz`` holds the tally, the state of each writer and the identity of the build, followed by
a SHA-256. It is replaced atomically. ``digests.bin`` is append-only and holds the digest of each
document; ``signatures.bin`` holds its signature where near-duplicates are dropped. The state says
how many of their bytes are valid. The building process holds a lock on
``lock``. ``files`` lists the files that it writes.
"""

import contextlib
import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.durable import fsync
from data_pipeline.building.encoding import DIGEST_BYTES
from data_pipeline.building.near_duplicates import LIST, SIGNATURES
from data_pipeline.errors import DataError
from data_pipeline.reading.corpus import SPLITS, TOKENIZER, WORD_STARTS, index_digest
from data_pipeline.shards import manifest
from data_pipeline.shards.index import PATTERN, is_intact, shard_name
from data_pipeline.shards.locking import exclusive
from data_pipeline.shards.manifest import DIGESTS, MANIFEST, PART
from data_pipeline.shards.writing import CommittedPrefix, State, disk_errors

JOURNAL = ".build"
LOCK, FILES = f"{JOURNAL}/lock", f"{JOURNAL}/files"
FOLDERS = (*SPLITS, TOKENIZER, JOURNAL)
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
    """Remove the files of a corpus and its folders that are empty; its manifest shows what is left.

    The manifest goes last, so that a call that was interrupted can be repeated.
    """
    Claims(folder).remove_journal()
    *files, manifest_file = files_of_corpus(folder)
    for path in files:
        path.unlink(missing_ok=True)
    for place in (*map(folder.joinpath, SPLITS), *folder.glob(f"{TOKENIZER}*")):
        remove_if_empty(place)
    manifest_file.unlink()
    remove_if_empty(folder)


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


STATE, STATE_PART = "state.npz", "state.part"
LOGS = DIGESTS, SIGNATURES  # of each document


@dataclass(frozen=True)
class Saved:
    """A saved state, as `Journal.load` returns it."""

    tally: dict[str, Any]
    digests: set[bytes]
    signatures: bytes
    states: dict[str, State]


def alone_in(journal: Path) -> AbstractContextManager[None]:
    """Create the folder of a journal and lock it; DataError if another build holds the lock."""
    refusal = "another build is running there; wait until it ends, or choose another --out"
    return exclusive(journal, f"{journal.parent}: {refusal}")


class Journal:
    """Saves and loads the state of one build in `folder`, which must exist."""

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self._folder, self._identity = folder, identity
        self._noted: dict[str, list[bytes]] = {name: [] for name in LOGS}
        self._prefixes = {name: CommittedPrefix() for name in LOGS}

    @property
    def advice(self) -> str:
        """The advice to the user if the files do not match the state."""
        return f"remove {self._folder / STATE} and run the same command to build from the start"

    @property
    def files(self) -> list[Path]:
        """The files that the journal writes."""
        return [self._folder / name for name in (STATE, STATE_PART, *LOGS)]

    def note(self, log: str, data: bytes) -> None:
        """Add a document's digest or signature to the next save."""
        self._noted[log].append(data)

    def save(self, tally: dict[str, Any], states: dict[str, State]) -> None:
        """Save the state, replacing the previous one."""
        sizes = {log: self._write(log) for log in LOGS}
        head = {"tally": tally, "identity": self._identity, "logs": sizes}
        arrays: dict[str, Any] = {
            f"{split}/{name}": array
            for split, state in states.items()
            for name, array in state.items()
        }
        content = io.BytesIO()
        np.savez(content, head=np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays)
        part = self._folder / STATE_PART
        with disk_errors(part), open(part, "wb") as file:
            file.write(content.getbuffer())
            file.write(hashlib.sha256(content.getbuffer()).digest())
            file.flush()
            os.fsync(file.fileno())
            part.replace(self._folder / STATE)

    def load(self) -> Saved | None:
        """The state saved last, or None.

        Raises DataError if it belongs to another build or is damaged.
        """
        path = self._folder / STATE
        if not os.path.lexists(path):
            return None
        with np.load(io.BytesIO(self._content(path)), allow_pickle=False) as archive:
            arrays = dict(archive.items())
        head = json.loads(arrays.pop("head").tobytes())
        if "logs" not in head or head["identity"] != json.loads(json.dumps(self._identity)):
            raise DataError(
                f"{self._folder.parent}: holds an unfinished build with other inputs or options; "
                "repeat its command, or remove the folder"
            )
        self._prefixes = {log: CommittedPrefix(*head["logs"][log]) for log in LOGS}
        states: dict[str, State] = {}
        for name, array in arrays.items():
            split, key = name.split("/")
            states.setdefault(split, {})[key] = array
        digests, signatures = map(self._read, LOGS)
        split = range(0, len(digests), DIGEST_BYTES)
        kept = {digests[at : at + DIGEST_BYTES] for at in split}
        return Saved(head["tally"], kept, signatures, states)

    def _content(self, path: Path) -> bytes:
        """The npz bytes of a state. Raises DataError if their SHA-256 is wrong."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        content = data[: -hashlib.sha256().digest_size]
        if hashlib.sha256(content).digest() != data[len(content) :]:
            raise DataError(f"{path}: damaged; {self.advice}")
        return content

    def keep(self, log: str) -> None:
        """Move the digests or signatures of all documents, in order, to the built folder."""
        self._write(log)
        self._move(self._folder, self._folder.parent, log)

    @staticmethod
    def _move(source: Path, target: Path, log: str) -> None:
        with disk_errors(target / log):
            (source / log).replace(target / log)

    def _write(self, log: str) -> tuple[int, int]:
        """Append what was noted. Returns the size of the file and its CRC-32."""
        prefix, data = self._prefixes[log], b"".join(self._noted[log])
        self._noted[log].clear()
        path = self._folder / log
        with disk_errors(path):
            prefix.append(path, data)
            fsync(path)
        return prefix.size, prefix.crc32

    def _read(self, log: str) -> bytes:
        prefix, path = self._prefixes[log], self._folder / log
        if not path.exists() and (self._folder.parent / log).exists():  # killed after `keep`
            self._move(self._folder.parent, self._folder, log)
        prefix.verify(path, self.advice)
        return path.read_bytes()[: prefix.size] if prefix.size else b""
