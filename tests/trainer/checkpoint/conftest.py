"""Fixtures of the checkpoint tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.checkpoint.saving import save
from trainer.checkpoint.attempts import Attempt, published


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Attempt]:
    """A run with checkpoints 2 and 3, which is the number kept."""
    folder = tmp_path / "run"
    folder.mkdir()
    attempt = Attempt.begin(folder)
    for step in (1, 2, 3):
        save(folder, step, attempt)
    assert published(folder / "checkpoints") == [2, 3]
    return folder, attempt
