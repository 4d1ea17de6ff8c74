"""Disks that are read-only or full: what can be read is used, and what fails is one line."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from data_pipeline import DataError
from data_pipeline.reading.dumping import write_dump
from data_pipeline.shards.index import cached_array
from data_pipeline.shards.writing import disk_errors


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are neither created nor removed; root could write to a folder without permissions."""

    def refuse(path: str | Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr("data_pipeline.reading.dumping.open", refuse, raising=False)


@pytest.mark.usefixtures("read_only")
def test_counts_are_computed_where_they_cannot_be_cached(tmp_path: Path) -> None:
    """Once in a process: on a large corpus that takes long."""
    computed: list[int] = []

    def compute() -> NDArray:
        computed.append(1)
        return np.arange(3)

    for _ in range(2):
        found = cached_array(tmp_path / "sequences-x.npy", "origin", 3, compute)
        assert found.tolist() == [0, 1, 2]
    assert len(computed) == 1
    other = cached_array(tmp_path / "sequences-x.npy", "another origin", 3, lambda: np.ones(3))
    assert other.tolist() == [1, 1, 1]


@pytest.mark.usefixtures("read_only")
def test_a_dump_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        write_dump(tmp_path / "rows.npz", {"step": np.arange(3)})
    reason = "cannot be written: Read-only file system"
    assert str(refused.value) == f"{tmp_path / 'rows.npz'}: {reason}"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_array_that_is_cut_short_is_a_full_disk(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match=f"{tmp_path}: the disk is full"),
        disk_errors(tmp_path / "array.npy"),
        open("/dev/full", "wb") as file,
    ):
        np.arange(100_000).tofile(file)


def test_an_error_without_a_number_has_its_own_words(tmp_path: Path) -> None:
    (path := tmp_path / "a").touch()
    message = "a: cannot be written: .* are the same file"
    with pytest.raises(DataError, match=message), disk_errors(path):
        shutil.copyfile(path, path)
