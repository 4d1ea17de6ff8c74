"""Atomic writes: what a failed one leaves."""

import os
from pathlib import Path

import pytest

from configs.durable import atomic_file, atomic_write


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_content_alone(
    tmp_path: Path, error: BaseException
) -> None:
    path = tmp_path / "a.json"
    atomic_write(path, "old")

    def fail() -> None:
        with atomic_file(path) as file:
            file.write(b"new")
            raise error

    with pytest.raises(type(error), match=r"a\.json|^$"):
        fail()
    assert os.listdir(tmp_path) == ["a.json"]
    assert path.read_text() == "old"
