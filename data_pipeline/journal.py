"""The journal of an unfinished build: where to go on from.

``state.npz`` holds the tally, the state of each writer and the identity of the build, and is
replaced as a whole; ``digests.bin`` grows by the digest of each document, and the state says how
much of it counts. ``lock`` is locked by the process that builds.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.encoding import DIGEST_BYTES
from data_pipeline.errors import DataError
from data_pipeline.writing import State, disk_errors


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
    with disk_errors(folder):
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
        self._digest_bytes = 0

    def note(self, digest: bytes) -> None:
        """Remember the digest of a document."""
        self._noted.append(digest)

    def save(self, tally: dict, states: dict[str, State]) -> None:
        """Put down the state, replacing the one before."""
        self._write_digests()
        head = {"tally": tally, "identity": self._identity, "digest_bytes": self._digest_bytes}
        arrays: dict[str, Any] = {
            f"{split}/{name}": array
            for split, state in states.items()
            for name, array in state.items()
        }
        part, path = self._folder / "state.part", self._folder / "state.npz"
        with disk_errors(part), open(part, "wb") as file:
            np.savez(file, head=np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays)
            file.flush()
            os.fsync(file.fileno())
            part.replace(path)

    def load(self) -> Saved | None:
        """The state last saved, or None. Raises DataError when it is of another build."""
        path = self._folder / "state.npz"
        if not path.exists():
            self._digest_bytes = 0
            return None
        with np.load(path, allow_pickle=False) as found:
            arrays = dict(found.items())
        head = json.loads(arrays.pop("head").tobytes())
        if head["identity"] != json.loads(json.dumps(self._identity)):
            raise DataError(
                f"{self._folder.parent}: holds an unfinished build with other inputs or options; "
                "repeat its command, or remove the folder"
            )
        self._digest_bytes = head["digest_bytes"]
        states: dict[str, State] = {}
        for name, array in arrays.items():
            split, key = name.split("/")
            states.setdefault(split, {})[key] = array
        return Saved(head["tally"], self._read_digests(), states)

    def keep_digests(self, path: Path) -> None:
        """Leave the digests of all documents, in order, in a file of their own."""
        self._write_digests()
        with disk_errors(path):
            self._digests.replace(path)

    @property
    def _digests(self) -> Path:
        return self._folder / "digests.bin"

    def _write_digests(self) -> None:
        data = b"".join(self._noted)
        self._noted.clear()
        with disk_errors(self._digests), open(self._digests, "ab") as file:
            file.truncate(self._digest_bytes)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._digest_bytes += len(data)

    def _read_digests(self) -> set[bytes]:
        data = self._digests.read_bytes()[: self._digest_bytes]
        return {data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)}
