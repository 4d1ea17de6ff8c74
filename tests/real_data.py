"""Real text, tasks and tokenizers, which are no part of the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

FOLDER = Path(os.environ.get("TANDEM_TEST_DATA") or REPOSITORY.parent / "shared" / "data")


def real_data(*parts: str) -> Path:
    """A file or folder of the real data; the test is skipped, saying so, if it is not there."""
    path = FOLDER.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path} is not there; TANDEM_TEST_DATA names the folder of real data")
    return path
