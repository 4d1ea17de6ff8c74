"""The journal of an unfinished build, from which it resumes.

``state.npz`` holds the tally, the state of each writer and the identity of the build, followed by
a SHA-256. It is replaced atomically. ``digests.bin`` is append-only and holds the digest of each
document; ``signatures.bin`` holds its signature where near-duplicates are dropped. The state says
how many of their bytes are valid. The building process holds a lock on
``lock``. ``files`` lists the files that it writes (`data_pipeline.building.claims`).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.building.encoding import DIGEST_BYTES
from data_pipeline.building.near_duplicates import SIGNATURES
from data_pipeline.errors import DataError
from data_pipeline.shards.locking import exclusive
from data_pipeline.shards.manifest import DIGESTS
from data_pipeline.shards.writing import CommittedPrefix, State, disk_errors, fsync

STATE, PART = "state.npz", "state.part"
LOGS = DIGESTS, SIGNATURES  # of each document


@dataclass(frozen=True)
class Saved:
    """A saved state, as `Journal.load` returns it."""

    tally: dict
    digests: set[bytes]
    signatures: bytes
    states: dict[str, State]


def alone_in(journal: Path) -> AbstractContextManager[None]:
    """Create the folder of a journal and lock it; DataError if another build holds the lock."""
    refusal = "another build is running there; wait until it ends, or choose another --out"
    return exclusive(journal, f"{journal.parent}: {refusal}")


class Journal:
    """Saves and loads the state of one build in `folder`, which must exist."""

    def __init__(self, folder: Path, identity: dict) -> None:
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
        return [self._folder / name for name in (STATE, PART, *LOGS)]

    def note(self, log: str, data: bytes) -> None:
        """Add a document's digest or signature to the next save."""
        self._noted[log].append(data)

    def save(self, tally: dict, states: dict[str, State]) -> None:
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
        part = self._folder / PART
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

    def keep(self, log: str, path: Path) -> None:
        """Move the digests or signatures of all documents, in order, to the file `path`."""
        self._write(log)
        with disk_errors(path):
            (self._folder / log).replace(path)

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
        prefix.verify(path, self.advice)
        return path.read_bytes()[: prefix.size] if prefix.size else b""
