"""The journal of an unfinished build: where to go on from.

``state.npz`` holds the tally, the state of each writer and the identity of the build, with a
SHA-256 behind it, and is replaced as a whole; ``digests.bin`` grows by the digest of each document,
and the state says how much of it counts. ``lock`` is locked by the process that builds, and
``files`` has the names of all files that it writes (`data_pipeline.building.claims`).
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.building.encoding import DIGEST_BYTES
from data_pipeline.errors import DataError
from data_pipeline.shards.growing import Growth
from data_pipeline.shards.writing import State, disk_errors, to_disk

STATE, PART, DIGESTS = "state.npz", "state.part", "digests.bin"


@dataclass(frozen=True)
class Saved:
    """What `Journal.load` finds."""

    tally: dict
    digests: set[bytes]
    states: dict[str, State]


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make `folder` and keep other builds out of it; a process that dies gives it free.

    Raises DataError when another is at work in it.
    """
    with disk_errors(folder / "lock"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)  # not passed on to children
    with open(lock, "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{folder.parent}: another build is at work there; wait for its end, or choose "
                "another --out"
            ) from None
        except OSError:
            pass  # a file system that knows no locks
        yield


class Journal:
    """Puts down and finds again the state of one build in `folder`, which must exist."""

    def __init__(self, folder: Path, identity: dict) -> None:
        self._folder, self._identity = folder, identity
        self._noted: list[bytes] = []
        self._digests = Growth()

    @property
    def advice(self) -> str:
        """What a user can do where the files are not as the state says."""
        return f"remove {self._folder / STATE}, and the same command builds anew"

    @property
    def files(self) -> list[Path]:
        """Those that it writes."""
        return [self._folder / name for name in (STATE, PART, DIGESTS)]

    def note(self, digest: bytes) -> None:
        """Remember the digest of a document."""
        self._noted.append(digest)

    def save(self, tally: dict, states: dict[str, State]) -> None:
        """Put down the state, replacing the one before."""
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
        """The state last saved, or None.

        Raises DataError when it is of another build, or not as it was saved.
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
        self._digests = Growth(*head["digests"])
        states: dict[str, State] = {}
        for name, array in arrays.items():
            split, key = name.split("/")
            states.setdefault(split, {})[key] = array
        return Saved(head["tally"], self._read_digests(), states)

    def _content(self, path: Path) -> bytes:
        """The npz bytes of a state. Raises DataError unless their SHA-256 is right."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from None
        content = data[: -hashlib.sha256().digest_size]
        if hashlib.sha256(content).digest() != data[len(content) :]:
            raise DataError(f"{path}: damaged; {self.advice}")
        return content

    def keep_digests(self, path: Path) -> None:
        """Leave the digests of all documents, in order, in a file of their own."""
        self._write_digests()
        with disk_errors(path):
            (self._folder / DIGESTS).replace(path)

    def _write_digests(self) -> None:
        data = b"".join(self._noted)
        self._noted.clear()
        path = self._folder / DIGESTS
        with disk_errors(path):
            self._digests.append(path, data)
            to_disk(path)

    def _read_digests(self) -> set[bytes]:
        path = self._folder / DIGESTS
        self._digests.verify(path, self.advice)
        data = path.read_bytes()[: self._digests.size] if self._digests.size else b""
        return {data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)}
