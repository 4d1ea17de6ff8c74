"""Damaged files of a checkpoint are named, and an earlier checkpoint is used."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.checkpoint.saving import is_whole, newest, save
from trainer.checkpoint import reader
from trainer.checkpoint.attempts import Attempt, published
from trainer.checkpoint.carried import Carried
from trainer.checkpoint.folder import all_steps
from trainer.checkpoint.reader import Checkpoint, newest_intact
from trainer.errors import CheckpointError, UnreadableCheckpoint


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "bit": flip_a_bit,
    "truncated": truncate,
    "missing": Path.unlink,
}
FILES = ["teacher/rank-00000.safetensors", "trainer.json", "manifest.json"]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_named_and_the_one_before_is_used(
    run: tuple[Path, Attempt], file: str, damage: str
) -> None:
    folder, _ = run
    path = folder / "checkpoints" / "step-000000003" / file
    DAMAGE[damage](path)
    lines: list[str] = []
    checkpoint = newest_intact(folder / "checkpoints", lines.append)
    assert checkpoint is not None
    assert checkpoint.step == 2
    assert is_whole(checkpoint)
    assert len(lines) == 1
    assert lines[0].startswith(f"{path} is damaged")
    assert lines[0].endswith("using the checkpoint before step 3")


def test_a_file_that_was_truncated_since_it_was_verified_is_named(
    run: tuple[Path, Attempt],
) -> None:
    checkpoint = newest(run[0])
    truncate(path := checkpoint.path / FILES[0])
    with pytest.raises(CheckpointError, match=rf"^{path} is damaged \(.*\)$"):
        checkpoint.master_weights("teacher")


def test_a_damaged_file_that_the_next_checkpoint_would_take_over_is_named_where_it_is(
    run: tuple[Path, Attempt], tmp_path: Path
) -> None:
    checkpoint = newest(run[0])
    carried = Carried.of(checkpoint, ["teacher"])
    flip_a_bit(path := checkpoint.path / FILES[0])
    (tmp_path / "next" / "teacher").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=rf"^{path} is damaged"):
        carried.copy(tmp_path / "next", 0, 1)


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_cannot_be_opened_is_no_damage(run: tuple[Path, Attempt], file: str) -> None:
    """An older checkpoint would lose steps. A loop of links acts as no permission."""
    checkpoints = run[0] / "checkpoints"
    path = checkpoints / "step-000000003" / file
    content = path.read_bytes()
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(UnreadableCheckpoint) as refused:
        newest_intact(checkpoints, pytest.fail)
    assert str(refused.value).startswith(
        f"{path} cannot be read (Too many levels of symbolic links)"
    )
    path.unlink()
    path.write_bytes(content)
    assert newest(run[0]).step == 3


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{}", "not the manifest of a checkpoint"),
        ("[1, 2]", "not the manifest of a checkpoint"),
        ('{"content": {', "not JSON: "),
        ("[" * 100_000, "not JSON: "),
        ('{"content": {}, "sha256": ""}', "its checksum differs"),
    ],
)
def test_what_is_wrong_with_a_manifest_is_said_in_words(
    run: tuple[Path, Attempt], content: str, reason: str
) -> None:
    path = run[0] / "checkpoints" / "step-000000003" / "manifest.json"
    path.write_text(content)
    with pytest.raises(CheckpointError) as damaged:
        Checkpoint(run[0] / "checkpoints", 3)
    assert str(damaged.value).startswith(f"{path} is damaged ({reason}")


def test_a_checkpoint_that_a_live_run_deletes_while_it_is_read(
    run: tuple[Path, Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, attempt = run
    opened = Checkpoint(folder / "checkpoints", 3)
    check = reader.check_file

    def meanwhile(*arguments: Any) -> None:
        if 3 in published(folder / "checkpoints"):
            save(folder, 4, attempt)
            save(folder, 5, attempt)
        check(*arguments)

    monkeypatch.setattr(reader, "check_file", meanwhile)
    assert newest(folder).step == 5
    with pytest.raises(CheckpointError, match="the run has deleted this checkpoint"):
        opened.master_weights("teacher")


def test_damaged_later_checkpoints_do_not_push_out_good_ones(run: tuple[Path, Attempt]) -> None:
    folder, _ = run
    for step in (2, 3):
        shutil.copytree(
            folder / "checkpoints" / f"step-{step:09d}",
            folder / "checkpoints" / f"step-{step + 10:09d}",
        )
    following = Attempt.begin(folder)
    for step in (4, 5):
        save(folder, step, following)
    assert published(folder / "checkpoints") == [4, 5, 12, 13]


def test_what_was_passed_over_makes_room_once_it_is_behind(run: tuple[Path, Attempt]) -> None:
    """A damaged or late checkpoint neither counts towards retention nor stays for ever."""
    folder, before = run
    save(folder, 4, before, keep=9)
    flip_a_bit(folder / "checkpoints" / "step-000000003" / FILES[0])
    following = Attempt.begin(folder)
    shutil.copytree(folder / "checkpoints/step-000000004", folder / "checkpoints/step-000000006")
    for step, left in ((5, [2, 5, 6]), (8, [2, 5, 8]), (9, [2, 8, 9])):
        save(folder, step, following, resumed_from=2)
        assert all_steps(folder / "checkpoints") == left


def test_reading_unpickles_nothing(
    run: tuple[Path, Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **settings: Any) -> None:
        raise AssertionError("a pickle may run any code")

    monkeypatch.setattr(torch, "load", refuse)
    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    assert newest(run[0]).step == 3  # every number of it is read


def test_where_all_are_damaged_nothing_is_begun_anew(run: tuple[Path, Attempt]) -> None:
    folder, _ = run
    lines: list[str] = []
    assert newest_intact(folder / "elsewhere", lines.append) is None
    for step in (2, 3):
        flip_a_bit(folder / "checkpoints" / f"step-{step:09d}" / FILES[0])
    oldest = folder / "checkpoints" / "step-000000002" / FILES[0]
    with pytest.raises(CheckpointError, match=rf"^{oldest} is damaged .*no intact .* before it"):
        newest_intact(folder / "checkpoints", lines.append)
    assert len(lines) == 1


def test_a_digit_changed_inside_the_manifest_is_noticed(run: tuple[Path, Attempt]) -> None:
    path = run[0] / "checkpoints" / "step-000000003" / "manifest.json"
    path.write_text(path.read_text().replace('"group": 0', '"group": 1', 1))
    with pytest.raises(CheckpointError, match="damaged"):
        Checkpoint(run[0] / "checkpoints", 3)
