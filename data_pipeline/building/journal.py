"""The journal of an unfinished build, from which it resumes.

``state.npz`` holds the tally, the state of each writer and the identity of the build, followed by
a SHA-256. It is replaced atomically. ``digests.bin`` is append-only and holds the digest of each
document; the state says how many of its bytes are valid. The building process holds a lock on
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
from data_pipeline.errors import DataError
from data_pipeline.shards.locking import exclusive
from data_pipeline.shards.writing import CommittedPrefix, State, disk_errors, fsync

STATE, PART, DIGESTS = "state.npz", "state.part", "digests.bin"


@dataclass(frozen=True)
class Saved:
    """A saved state, as `Journal.load` returns it."""

    tally: dict
    digests: set[bytes]
    states: dict[str, State]


def alone_in(journal: Path) -> AbstractContextManager[None]:
    """Create the folder of a journal and lock it; DataError if another build holds the lock."""
    refusal = "another build is running there; wait until it ends, or choose another --out"
    return exclusive(journal, f"{journal.parent}: {refusal}")


class Journal:
    """Saves and loads the state of one build in `folder`, which must exist."""

    def __init__(self, folder: Path, identity: dict) -> None:
        self._folder, self._identity = folder, identity
        self._noted: list[bytes] = []
        self._digests = CommittedPrefix()

    @property
    def advice(self) -> str:
        """The advice to the user if the files do not match the state."""
        return f"remove {self._folder / STATE} and run the same command to build from the start"

    @property
    def files(self) -> list[Path]:
        """The files that the journal writes."""
        return [self._folder / name for name in (STATE, PART, DIGESTS)]

    def note(self, digest: bytes) -> None:
        """Add the digest of a document to the next save."""
        self._noted.append(digest)

    def save(self, tally: dict, states: dict[str, State]) -> None:
        """Save the state, replacing the previous one."""
        self._write_digests()
        head = {
            "tally": tally,
            "identity": self._identity,
            "digests": [self._digests.size, self._digests.crc32],
        }
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
        with np.load(io.BytesIO(self._content(path)), allow_pickle=False) as found:
            arrays = dict(found.items())
        head = json.loads(arrays.pop("head").tobytes())
        if head["identity"] != json.loads(json.dumps(self._identity)):
            raise DataError(
                f"{self._folder.parent}: holds an unfinished build with other inputs or options; "
                "repeat its command, or remove the folder"
            )
        self._digests = CommittedPrefix(*head["digests"])
        states: dict[str, State] = {}
        for name, array in arrays.items():
            split, key = name.split("/")
            states.setdefault(split, {})[key] = array
        return Saved(head["tally"], self._read_digests(), states)

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

    def keep_digests(self, path: Path) -> None:
        """Move the digests of all documents, in order, to the file `path`."""
        self._write_digests()
        with disk_errors(path):
            (self._folder / DIGESTS).replace(path)

    def _write_digests(self) -> None:
        data = b"".join(self._noted)
        self._noted.clear()
        path = self._folder / DIGESTS
        with disk_errors(path):
            self._digests.append(path, data)
            fsync(path)

    def _read_digests(self) -> set[bytes]:
        path = self._folder / DIGESTS
        self._digests.verify(path, self.advice)
        data = path.read_bytes()[: self._digests.size] if self._digests.size else b""
        return {data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)}
