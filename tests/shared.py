"""Folders that the workers of a test session share: the first one that needs it makes it."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class SharedFolders:
    """Makes a folder of each name once. No test may change what is in it."""

    place: Path  # the same for all workers

    @classmethod
    def of(cls, factory: pytest.TempPathFactory) -> SharedFolders:
        """Those of this session; a worker of pytest-xdist has a folder of its own in them."""
        own = factory.getbasetemp()
        return cls(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)

    def __call__(self, name: str, make: Callable[[Path], object]) -> Path:
        """The folder that ``make(folder)`` has filled; waits while another worker makes it."""
        folder, made = self.place / name, self.place / f"{name}.made"
        with (self.place / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                shutil.rmtree(folder, ignore_errors=True)  # another worker has failed to make it
                folder.mkdir()
                make(folder)
                made.touch()
        return folder
