"""A superseded attempt can change nothing, and notices that it is superseded."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.checkpoint.saving import newest, save
from trainer.checkpoint import folder, publication, reader
from trainer.checkpoint.attempts import Attempt, live_owner, published
from trainer.checkpoint.reader import missing, newest_intact
from trainer.errors import CheckpointError, StaleAttempt


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def test_a_stale_attempt_stops_before_it_writes(run: Path) -> None:
    first = Attempt.begin(run)
    save(run, 1, first)
    first.check()
    second = Attempt.begin(run)
    assert (first.number, second.number) == (1, 2)
    with pytest.raises(StaleAttempt, match="attempt 2 of this run has begun; attempt 1 stops"):
        first.check()
    with pytest.raises(StaleAttempt):
        save(run, 2, first)
    assert os.listdir(run / "checkpoints") == ["step-000000001"]
    save(run, 2, second)
    assert newest(run).step == 2


def test_one_that_goes_stale_while_writing_does_not_publish(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Attempt.begin(run)
    save(run, 1, first)
    write = publication.write_durably

    def overtaken(*arguments: object) -> object:
        if not (run / "attempts" / "000002.json").exists():
            Attempt.begin(run)  # clears what the first has written so far
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(publication, "write_durably", overtaken)
    with pytest.raises(StaleAttempt):
        save(run, 2, first)
    assert os.listdir(run / "checkpoints") == ["step-000000001"]


def test_one_that_goes_stale_before_its_folder_is_cleared_does_not_publish(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Attempt.begin(run)
    save(run, 1, first)
    write, records = publication.write_durably, run / "attempts"

    def overtaken(folder: Path, name: str, *content: object) -> object:
        if name == publication.MANIFEST:
            shutil.copy(records / "000001.json", records / "000002.json")
        return write(folder, name, *content)  # type: ignore[arg-type]

    monkeypatch.setattr(publication, "write_durably", overtaken)
    with pytest.raises(StaleAttempt):
        save(run, 2, first)
    assert os.listdir(run / "checkpoints") == ["step-000000001"]


def test_a_folder_that_this_node_does_not_see_yet_is_tried_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS: the server has it, but an answer of before is still in the cache."""
    make, answers = Path.mkdir, [FileExistsError(17, "exists"), FileNotFoundError(2, "none")]

    def mkdir(path: Path, *arguments: object, **options: object) -> None:
        if answers and path.name == "teacher" and options.get("exist_ok"):
            raise answers.pop()
        make(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", mkdir)
    monkeypatch.setattr(publication, "_RETRY_SECONDS", 0.01)
    save(run, 1, Attempt.begin(run))
    assert newest(run).step == 1


def test_one_that_goes_stale_once_it_has_published_deletes_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer attempt may have resumed from any of them."""
    first = Attempt.begin(run)
    for step in (1, 2):
        save(run, step, first)
    rename = publication._rename_into_place

    def overtaken(staging: Path, final: Path, number: int) -> None:
        rename(staging, final, number)
        Attempt.begin(run)

    monkeypatch.setattr(publication, "_rename_into_place", overtaken)
    with pytest.raises(StaleAttempt):
        save(run, 3, first)
    assert published(run / "checkpoints") == [1, 2, 3]


def test_what_it_publishes_in_spite_of_all_is_ignored(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is frozen between its last check and the rename cannot notice."""
    first = Attempt.begin(run)
    save(run, 1, first)
    second = Attempt.begin(run)
    with monkeypatch.context() as blind:
        blind.setattr(Attempt, "check", lambda self: None)
        save(run, 2, first)
    assert "step-000000002" in os.listdir(run / "checkpoints")
    assert published(run / "checkpoints") == [1]
    assert newest(run).step == 1
    save(run, 2, second)
    assert published(run / "checkpoints") == [1, 2]
    third = Attempt.begin(run)
    assert published(run / "checkpoints") == [1, 2]
    save(run, 3, third)
    assert newest(run).step == 3


def test_a_save_reads_only_what_is_new_whatever_is_kept(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Attempt.begin(run)
    attempt, reads = Attempt.begin(run), list[Path]()
    read_json = folder.read_json
    monkeypatch.setattr(folder, "read_json", lambda path: reads.append(path) or read_json(path))
    for step in range(1, 9):
        reads.clear()
        save(run, step, attempt, keep=99)
        assert len(reads) <= 1  # of the checkpoint itself
    assert published(run / "checkpoints") == [*range(1, 9)]
    shutil.copyfile(_trainer_json(run, 7), _trainer_json(run, 8))
    reads.clear()
    assert published(run / "checkpoints") == [*range(1, 9)]
    assert reads == [_trainer_json(run, 8)]  # another file


def _trainer_json(run: Path, step: int) -> Path:
    return run / "checkpoints" / folder.step_name(step) / folder.TRAINER


def test_only_rank_0_looks_which_checkpoints_there_are(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 1, Attempt.begin(run))

    def broadcast(told: list[Any], **group: Any) -> None:
        assert told == [None]
        told[:] = [[1]]

    group = SimpleNamespace(
        get_rank=lambda group: 1,
        get_world_size=lambda group: 2,
        broadcast_object_list=broadcast,
        all_gather_object=lambda damages, damage, group: None,
    )
    monkeypatch.setattr(reader, "dist", group)
    monkeypatch.setattr(reader, "published", lambda folder: pytest.fail("rank 1 looks"))
    checkpoint = newest_intact(run / "checkpoints", pytest.fail, object())  # type: ignore[arg-type]
    assert checkpoint is not None
    assert checkpoint.step == 1


def test_a_run_folder_that_was_removed_is_not_written_again(run: Path) -> None:
    attempt = Attempt.begin(run)
    shutil.rmtree(run)
    run.mkdir()
    with pytest.raises(StaleAttempt, match="the run folder was removed; attempt 1 stops"):
        save(run, 1, attempt)


def test_an_attempt_that_died_while_beginning_changes_nothing(run: Path) -> None:
    first = Attempt.begin(run)
    save(run, 1, first)
    (run / "attempts" / "000002.json").touch()
    assert published(run / "checkpoints") == [1]
    assert Attempt.begin(run).number == 3
    assert newest(run).step == 1


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere/attempts"):
        Attempt.begin(tmp_path / "nowhere")


def test_a_newer_attempts_unfinished_work_is_not_cleared(run: Path) -> None:
    (run / "checkpoints" / "step-000000009.writing-7").mkdir(parents=True)
    assert Attempt.begin(run).number == 1
    assert os.listdir(run / "checkpoints") == ["step-000000009.writing-7"]


def begin(run: Path) -> tuple[int, int | None]:
    """This process, and the attempt number that it got, if it was admitted."""
    try:
        return os.getpid(), Attempt.begin(run).number
    except CheckpointError:
        return os.getpid(), None


def test_of_processes_that_begin_at_once_one_is_let_in(run: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        outcomes = pool.map(begin, [run] * 20, chunksize=1)
    let_in = [(process, number) for process, number in outcomes if number]
    assert len({process for process, _ in let_in}) == 1
    assert sorted(number for _, number in let_in) == list(range(1, len(let_in) + 1))


def test_without_attempts_every_checkpoint_counts(run: Path) -> None:
    save(run, 1, None)
    save(run, 2, None)
    assert published(run / "checkpoints") == [1, 2]
    assert newest_intact(run / "checkpoints", pytest.fail).step == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "damage", [b"", b'{"attempt": 1, "host"', b"[1]", b"\xff\xfe", b'{"checkpoints": 7}']
)
def test_a_damaged_record_has_no_say_and_stops_nobody(run: Path, damage: bytes) -> None:
    first = Attempt.begin(run)
    save(run, 1, first)
    (run / "attempts" / "notes.json").write_text("no attempt")
    first.record.write_bytes(damage)
    second = Attempt.begin(run)
    assert second.number == 2
    second.record.write_bytes(damage)
    assert published(run / "checkpoints") == [1]
    second.disown_after(0)
    assert published(run / "checkpoints") == []
    save(run, 2, second)
    assert published(run / "checkpoints") == [2]
    second.record.write_bytes(damage)
    second.finish()
    second.end()
    assert live_owner(run) is None


def test_of_a_checkpoint_that_is_not_there_no_contradiction_is_told(run: Path) -> None:
    attempt = Attempt.begin(run)
    for step in (1, 2, 3):
        save(run, step, attempt, keep=9)
    Attempt.begin(run).disown_after(2)
    folder = run / "checkpoints"
    (folder / "step-000000004").touch()
    (folder / "step-0000000005").mkdir()
    there = published(folder)
    assert there == [1, 2]
    assert str(missing(folder, 4, there)) == (f"{folder}: no checkpoint of step 4; there are: 1, 2")
    assert "of step 3 is no longer valid" in str(missing(folder, 3, there))
    assert str(missing(folder, 2, there)).endswith("is not there; try again")
