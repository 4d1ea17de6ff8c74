"""What tests of checkpoints share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.checkpoint.saving import save
from trainer.checkpoint import Attempt, published


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Attempt]:
    """A run with checkpoints 2 and 3, the number that is kept."""
    folder = tmp_path / "run"
    folder.mkdir()
    attempt = Attempt.begin(folder)
    for step in (1, 2, 3):
        save(folder, step, attempt)
    assert published(folder / "checkpoints") == [2, 3]
    return folder, attempt
