"""Whatever goes wrong while a checkpoint is written, an earlier one can be loaded."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import RankFailed, run_distributed
from tests.mounting import mounted
from tests.trainer.checkpoint.saving import kill_at, newest, plain_engine, save
from tests.waiting import exit_code
from trainer.checkpoint import folder as checkpoint_folder
from trainer.checkpoint import publication
from trainer.checkpoint.attempts import Attempt, published
from trainer.checkpoint.folder import Retention, read_trainer_file
from trainer.checkpoint.reader import newest_intact
from trainer.checkpoint.writer import CheckpointWriter
from trainer.errors import CheckpointError, StaleAttempt

# ---------------------------------------------------------------------------------- SIGKILL


def killed_save(run: Path, step: int, attempt: Attempt, event: int) -> bool:
    """Save in a child that is killed just before its n-th disk operation; whether it was."""
    child = os.fork()
    if child == 0:
        kill_at(event, str(run))
        save(run, step, attempt)
        os._exit(0)
    code = exit_code(child)
    assert code in (0, -signal.SIGKILL)
    return code != 0


@pytest.mark.parametrize(
    "step", [pytest.param(4, id="new"), pytest.param(3, id="again", marks=pytest.mark.slow)]
)
def test_killed_at_every_act_on_the_disk(run: tuple[Path, Attempt], step: int) -> None:
    folder, attempt = run
    template = folder.with_name("template")
    shutil.copytree(folder, template)
    event = 1
    while killed_save(folder, step, attempt, event):
        following = Attempt.begin(folder)
        assert newest(folder).step in {3, step}
        assert sorted(os.listdir(folder / "checkpoints")) == [
            f"step-{left:09d}" for left in published(folder / "checkpoints")
        ]
        save(folder, 5, following)
        assert newest(folder).step == 5
        shutil.rmtree(folder)
        shutil.copytree(template, folder)
        event += 1
    assert event > 30
    assert newest(folder).step == step


def test_everything_is_on_the_disk_before_the_one_rename(
    run: tuple[Path, Attempt], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, attempt = run
    synced: set[int] = set()
    renamed: list[Path] = []
    fsync, rename = os.fsync, os.rename

    def note(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def check(source: Path, target: Path) -> None:
        if ".writing-" in source.name:
            written = [source, *source.rglob("*")]
            assert {path.stat().st_ino for path in written} <= synced
            assert len(written) > 6
            renamed.append(target)
            synced.clear()
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", check)
    save(folder, 4, attempt)
    assert renamed == [folder / "checkpoints" / "step-000000004"]
    assert (folder / "checkpoints").stat().st_ino in synced


def train_and_die(run: Path, rank: int) -> None:
    """Two ranks save; in the second save, one of them is killed in the middle of its file."""
    writer = CheckpointWriter(run / "checkpoints", Retention())
    writer.save(1, {"teacher": plain_engine(1.0)}, {"step": 1}, wait=True)
    if dist.get_rank() == rank:
        kill_at(4, ".writing-")
    writer.save(2, {"teacher": plain_engine(2.0)}, {"step": 2}, wait=True)


def test_one_rank_killed_in_the_middle_of_a_save(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 0 was ended by SIGKILL"):
        run_distributed(train_and_die, 2, tmp_path, 0)
    left = os.listdir(tmp_path / "checkpoints")
    assert sorted(left) == ["step-000000001", "step-000000002.writing-0"]
    checkpoint = newest_intact(tmp_path / "checkpoints", pytest.fail)
    assert checkpoint is not None
    assert checkpoint.step == 1
    Attempt.begin(tmp_path)
    assert os.listdir(tmp_path / "checkpoints") == ["step-000000001"]


# ---------------------------------------------------------------------------------- full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, if this process may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    with mounted(folder, "size=1m"):
        yield folder


def test_a_disk_that_fills_up_leaves_the_old_checkpoint(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="free some space"):
        save(small_disk, 1, None)
    monkeypatch.setattr(publication, "_RESERVE", -(10**9))  # the check sees room, the disk has none
    save(small_disk, 1, None, size=100)
    with pytest.raises(OSError, match=r"No space left.*safetensors") as caught:
        save(small_disk, 2, None, size=400)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(small_disk / "checkpoints") == ["step-000000001"]
    assert newest(small_disk).step == 1
    save(small_disk, 3, None, size=100)
    assert newest(small_disk).step == 3


def test_a_disk_without_room_for_the_record_of_an_attempt_is_named(small_disk: Path) -> None:
    (small_disk / "attempts").mkdir()
    (small_disk / "attempts" / "000001.json").touch()
    with contextlib.suppress(OSError):
        (small_disk / "ballast").write_bytes(bytes(2 << 20))
    with pytest.raises(OSError, match="No space left on device") as full:
        Attempt.begin(small_disk)
    assert full.value.filename == str(small_disk)
    (small_disk / "ballast").unlink()
    assert Attempt.begin(small_disk).number > 1


def fail_and_recover(folder: Path) -> dict[str, Any]:
    """Rank 1's disk is full for a while; returns what the writer does on both ranks."""
    lines: list[str] = []
    (file := folder.parent / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/checkpoints: Not a directory \(rank 0\)"):
        CheckpointWriter(file / "checkpoints", Retention())
    writer = CheckpointWriter(folder, Retention(), None, lines.append, max_failures=3)
    engines = {"teacher": plain_engine(1.0)}
    write_all = checkpoint_folder._write_all

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def set_disk(is_full: bool) -> None:
        if dist.get_rank() == 1:
            setattr(checkpoint_folder, "_write_all", full if is_full else write_all)  # noqa: B010

    writer.save(1, engines, {}, scores={"teacher": float("nan")})
    published_first = writer.wait()
    set_disk(is_full=True)
    writer.save(2, engines, {})
    failed_quietly = not writer.wait()
    with pytest.raises(CheckpointError, match="No space left"):
        writer.save(2, engines, {}, wait=True)
    set_disk(is_full=False)
    writer.save(3, engines, {}, wait=True)
    set_disk(is_full=True)
    for step in (4, 5, 6):
        writer.save(step, engines, {})
    with pytest.raises(CheckpointError, match=r"3 saves in a row failed.*No space left.*rank 1"):
        writer.save(7, engines, {})
    return {
        "first": published_first,
        "quiet": failed_quietly,
        "failures": writer.failures,
        "last": writer.last_published,
        "steps": published(folder),
        "lines": lines,
    }


def be_overtaken(run: Path) -> str:
    """A job of two ranks that keeps saving after a newer attempt has begun."""
    begun = [Attempt.begin(run) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(begun)
    writer = CheckpointWriter(run / "checkpoints", Retention(), begun[0])
    engines = {"teacher": plain_engine(1.0)}
    writer.save(1, engines, {}, wait=True)
    if dist.get_rank() == 0:
        Attempt.begin(run)
    dist.barrier()
    writer.save(2, engines, {})
    with pytest.raises(StaleAttempt) as caught:
        writer.save(3, engines, {})
    with pytest.raises(StaleAttempt):  # before it cuts the metrics of the newer one back
        CheckpointWriter(run / "checkpoints", Retention(), begun[0])
    return str(caught.value)


def fail_in_both_ways(full: Path, stale: Path) -> tuple[dict[str, Any], str]:
    told = be_overtaken(stale)
    return fail_and_recover(full / "checkpoints"), told  # the disk is full from then on


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[Any]]:
    """The folders of a run on a full disk and of a superseded one; what each rank saw."""
    full, stale = tmp_path_factory.mktemp("full"), tmp_path_factory.mktemp("stale")
    return full, stale, run_distributed(fail_in_both_ways, 2, full, stale)


def test_every_rank_of_a_stale_attempt_is_told(failed: tuple[Path, Path, list[Any]]) -> None:
    _, run, outcomes = failed
    message = f"{run}: attempt 2 of this run has begun; attempt 1 stops without touching it"
    assert [told for _, told in outcomes] == [message, message]
    assert os.listdir(run / "checkpoints") == ["step-000000001"]


def test_a_failure_on_one_rank_is_reported_once_and_counted_on_all(
    failed: tuple[Path, Path, list[Any]],
) -> None:
    folder = failed[0] / "checkpoints"
    one, two = (dict(outcome) for outcome, _ in failed[2])
    lines, silent = one.pop("lines"), two.pop("lines")
    assert one == two
    assert one["first"]
    assert one["quiet"]
    assert (one["failures"], one["last"], one["steps"]) == (5, 3, [1, 3])
    assert sorted(os.listdir(folder)) == ["step-000000001", "step-000000003"]
    stored = {"step": 1, "attempt": 0, "scores": {}, "state": {}}
    assert read_trainer_file(folder, 1) == stored
    assert silent == []
    file = "step-000000002.writing-0/teacher/rank-00001.safetensors"
    assert lines[0] == (
        f"the checkpoint of step 2 was not written: {folder}/{file}: "
        "No space left on device (rank 1)"
    )
    assert len(lines) == 5
