"""Atomic writes: what a failed one leaves, and what survives a power loss."""

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


def test_the_content_is_on_the_disk_before_the_rename_and_the_name_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acts: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace

    def note(descriptor: int) -> None:
        fsync(descriptor)
        acts.append(("fsync", os.fstat(descriptor).st_ino))

    def rename(source: Path, target: Path) -> None:
        assert source.read_bytes() == b"new"
        acts.append(("rename", source.stat().st_ino))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", rename)
    atomic_write(path := tmp_path / "a.json", "new")
    content, folder = path.stat().st_ino, tmp_path.stat().st_ino
    assert acts == [("fsync", content), ("rename", content), ("fsync", folder)]
