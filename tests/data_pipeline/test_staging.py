"""`data.stage`: a node's next data, copied to its own disk ahead of time, and its failures."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from data_pipeline import (
    BatchSizes,
    BatchStream,
    Corpus,
    CorpusSplit,
    DataConfig,
    DataError,
    MaskingConfig,
    PhaseConfig,
    SourceConfig,
)
from data_pipeline.reading.staging import (
    LOCK,
    PREFIX,
    STEPS_AHEAD,
    Stager,
    _locked_folder,
    remove_leftovers,
    stage_folder,
)
from data_pipeline.shards import sources
from data_pipeline.shards.ranges import CHECKSUM_BYTES, Staged
from tests.waiting import SECONDS, until

ROWS, STEPS = 6, 60
ROOM = 1 << 30


@pytest.fixture
def config(corpus: Corpus) -> DataConfig:
    return DataConfig(path=str(corpus.folder), sequence_length=64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "local").mkdir()
    return tmp_path / "local" / f"{PREFIX}run-1"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of the thread for each read of the corpus itself."""
    threads: list[str] = []
    read = sources.Folder.read

    def counted(self: sources.Folder, name: str, offset: int, size: int) -> bytes:
        threads.append(threading.current_thread().name)
        return read(self, name, offset, size)

    monkeypatch.setattr(sources.Folder, "read", counted)
    return threads


def open_stream(config: DataConfig, folder: Path | None = None, *share: int) -> BatchStream:
    return BatchStream.open(config, "train", 3, ROWS, *share, staged=folder)


def ahead(stream: BatchStream, first: int = 0) -> Iterator[tuple[int, list]]:
    return zip(itertools.count(first), stream.blocks_entered(first), strict=False)


def copies(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*/shard-*") if path.suffix != ".part"]


def settling(stager: Stager) -> Callable[[int], None]:
    """`stager.reached`, which then waits until the stager has copied all that it may."""
    change, settled = stager._change, threading.Event()
    wait = change.wait

    def noted() -> None:
        settled.set()
        wait()

    def reached(step: int) -> None:
        with change:
            settled.clear()
            stager.reached(step)
        assert settled.wait(SECONDS), "the stager never waited"

    change.wait = noted
    return reached


def test_what_is_ahead_is_what_is_read(
    corpus: Corpus, make_corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With phases, pairs, a growing batch, a mixture, and across the end of an epoch."""
    from tests.data_pipeline.conftest import make_documents

    config = DataConfig(
        sequence_length=64,
        phases=[
            PhaseConfig(from_step=40, sequence_length=32),
            PhaseConfig(from_step=80, packing="segment_pair"),
        ],
        masking=MaskingConfig(copies=1),
        mixture={
            "big": SourceConfig(str(corpus.folder), 2.0),
            "small": SourceConfig(str(make_corpus(make_documents(60, 77)).folder), 1.0),
        },
    )
    sizes = BatchSizes((0, 20), (6, 12))
    read: list[tuple[str, int]] = []
    read_block = CorpusSplit.read_block

    def noted(self: CorpusSplit, number: int):
        read.append((self.name, number))
        return read_block(self, number)

    monkeypatch.setattr(CorpusSplit, "read_block", noted)
    stream = BatchStream.open(config, "train", 3, sizes, 1, 2)
    entered = BatchStream.open(config, "train", 3, sizes, 1, 2).blocks_entered(0)
    needed = set()
    for step in range(120):
        blocks = {(split.name, block) for split, block in next(entered)}
        needed |= blocks
        read.clear()
        stream.batch(step)
        assert set(read) <= blocks
    assert len(needed) > 10


def test_the_reader_finds_all_that_is_ahead(
    config: DataConfig, folder: Path, reads: list[str]
) -> None:
    plain, stream = open_stream(config), open_stream(config, folder)
    expected = [plain.batch(step) for step in range(STEPS)]
    reads.clear()
    with Stager(folder, ahead(open_stream(config, folder)), ROOM, 0) as stager:
        reached = settling(stager)
        for step in range(STEPS):
            reached(step)
            batch = stream.batch(step)
            np.testing.assert_array_equal(batch.input_ids, expected[step].input_ids)
            np.testing.assert_array_equal(batch.labels(), expected[step].labels())
    assert set(reads) == {"staging"}
    assert not list(folder.parent.iterdir())


def test_what_was_read_is_dropped_and_what_is_kept_is_bounded(
    config: DataConfig, folder: Path, corpus: Corpus
) -> None:
    stream = open_stream(config, folder)
    largest = int(corpus.split("train").index.blocks["bytes"].max())
    room = 4 * largest
    seen = set()
    with Stager(folder, ahead(open_stream(config, folder)), room, 0) as stager:
        reached = settling(stager)
        for step in range(STEPS):
            reached(step)
            stream.batch(step)
            there = copies(folder)
            seen |= {path.name for path in there}
            assert len(there) <= 4 * largest / 1000
            sizes = [path.stat().st_size - CHECKSUM_BYTES for path in there if path.exists()]
            assert sum(sizes) <= room
    assert len(seen) > 10


def test_only_what_the_nodes_ranks_read_is_copied_and_once(
    config: DataConfig, folder: Path, reads: list[str]
) -> None:
    """Two nodes of two ranks: the second node's stager sees only its rows."""
    mine = [open_stream(config, folder, rank, 6) for rank in (3, 4, 5)]
    wanted = {
        (block, step)
        for stream in mine
        for step, blocks in zip(range(STEPS), stream.blocks_entered(0), strict=False)
        for _, block in blocks
    }
    node = open_stream(config, folder, 1, 2)
    together = {
        (block, step)
        for step, blocks in zip(range(STEPS), node.blocks_entered(0), strict=False)
        for _, block in blocks
    }
    assert together == wanted
    reads.clear()
    limited = itertools.islice(ahead(node), STEPS)
    with Stager(folder, limited, ROOM, 0):
        until(lambda: len({block for block, step in wanted if step}) <= len(reads))
    assert len(reads) == len({block for block, step in wanted if step})


def test_a_reader_never_waits(
    config: DataConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk never finishes, and a half-written file is not read."""
    stuck, free = threading.Event(), threading.Event()

    def slow(self: Staged, name: str, offset: int, data: bytes) -> None:
        (self.folder / f"{name}.{offset}.part").write_bytes(data[:100])
        stuck.set()
        free.wait(60)

    monkeypatch.setattr(Staged, "put", slow)
    plain, stream = open_stream(config), open_stream(config, folder)
    with Stager(folder, ahead(open_stream(config, folder)), ROOM, 0) as stager:
        assert stuck.wait(30)
        for step in range(STEPS):
            stager.reached(step)
            np.testing.assert_array_equal(stream.batch(step).input_ids, plain.batch(step).input_ids)
        free.set()
    assert not folder.exists()


@pytest.mark.parametrize("fault", ["full", "missing", "read_only"])
def test_a_disk_that_fails_is_named_once_and_done_without(
    config: DataConfig, folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    put, made = Staged.put, itertools.count()

    def full(self: Staged, name: str, offset: int, data: bytes) -> None:
        if next(made) == 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.folder))
        put(self, name, offset, data)

    if fault == "full":
        monkeypatch.setattr(Staged, "put", full)
    elif fault == "missing":
        folder = folder.parent / "gone" / folder.name
    else:
        folder.parent.rmdir()
        folder.parent.write_text("a file")
    plain, stream = open_stream(config), open_stream(config, folder)
    with Stager(folder, ahead(open_stream(config, folder)), ROOM, 0) as stager:
        until(lambda: caplog.records)
        for step in range(STEPS):
            stager.reached(step)
            np.testing.assert_array_equal(stream.batch(step).input_ids, plain.batch(step).input_ids)
    (record,) = caplog.records
    assert "data.stage: " in record.getMessage()
    assert "from now on this node reads from the corpus" in record.getMessage()
    assert not folder.exists()


def test_a_damaged_copy_is_not_believed(config: DataConfig, folder: Path, caplog) -> None:
    plain, stream = open_stream(config), open_stream(config, folder)
    with Stager(folder, ahead(open_stream(config, folder)), ROOM, 0) as stager:
        settling(stager)(0)
        for number, path in enumerate(copies(folder)):
            data = bytearray(path.read_bytes())
            data[100] ^= 1
            path.write_bytes(data if number % 2 else data[:50])
        for step in range(STEPS):
            stager.reached(step)
            np.testing.assert_array_equal(stream.batch(step).input_ids, plain.batch(step).input_ids)
    assert [record.getMessage().count(": damaged;") for record in caplog.records] == [1]


def test_a_damaged_corpus_is_its_readers_to_report(corpus: Corpus, folder: Path) -> None:
    split = corpus.split("train").staged_in(folder / "0")
    blocks = split.index.blocks.copy()
    blocks["crc32"] += 1
    damaged = dataclasses.replace(split, index=dataclasses.replace(split.index, blocks=blocks))
    nothing_more = ((step, []) for step in itertools.count(6))
    blocks_ahead = itertools.chain([(5, [(damaged, 0), (split, 1)])], nothing_more)
    with Stager(folder, blocks_ahead, ROOM, 0):
        until(lambda: copies(folder))
        assert len(copies(folder)) == 1


def test_what_a_killed_job_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    def left(name: str, locked: bool = True, more: str = "") -> Path:
        inner = tmp_path / f"{PREFIX}{name}" / "0"
        inner.mkdir(parents=True)
        for file in ("shard-000001.tar.512", "shard-000002.tar.0.part", *filter(None, [more])):
            (inner / file).write_bytes(b"x")
        if locked:
            (inner.parent / LOCK).touch()
        return inner.parent

    dead, unmarked, live = left("dead"), left("unmarked", locked=False), left("live")
    shared = left("shared", more="precious.txt")
    (tmp_path / "shard-000001.tar.512").write_bytes(b"somebody else's")
    with open(live / LOCK, "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_leftovers(tmp_path)
    assert not dead.exists()
    assert len(list(unmarked.rglob("shard-*"))) == len(list(live.rglob("shard-*"))) == 2
    assert [path.name for path in (shared / "0").iterdir()] == ["precious.txt"]
    assert (tmp_path / "shard-000001.tar.512").exists()


def _no_locks(*_: object) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


def test_without_locks_the_node_reads_from_the_corpus_and_says_so(
    config: DataConfig,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fcntl, "flock", _no_locks)
    with Stager(folder, ahead(open_stream(config, folder)), ROOM, 0):
        until(lambda: "this node reads from the corpus" in caplog.text)
    assert "cannot be locked" in caplog.text


def test_a_copy_that_is_dropped_while_its_next_reading_waits_is_made_again(
    config: DataConfig, folder: Path
) -> None:
    stream = open_stream(config, folder)
    _, (block, *_) = next(ahead(stream))
    again = iter([(1, [block]), (STEPS_AHEAD + 50, [block]), (10**9, [])])
    with Stager(folder, again, ROOM, 0) as stager:
        until(lambda: len(copies(folder)) == 1)
        stager.reached(49)  # the copy has been read; its next reading is too far ahead
        until(lambda: not copies(folder))
        stager.reached(60)
        until(lambda: len(copies(folder)) == 1)


def test_where_the_disk_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_DISK", str(tmp_path))
    assert stage_folder("$NODE_DISK/me", "a-1") == tmp_path / "me" / f"{PREFIX}a-1"
    monkeypatch.setenv("SET_BUT_EMPTY", "")
    for unset in ("$NOWHERE_AT_ALL", "$SET_BUT_EMPTY"):
        with pytest.raises(DataError, match=rf"data\.stage: \{unset} names .* not set"):
            stage_folder(unset, "a-1")
    with pytest.MonkeyPatch.context() as lustre:
        lustre.setattr(fcntl, "flock", _no_locks)
        with (
            pytest.raises(DataError, match=r"data\.stage: .* cannot be locked \(Function not impl"),
            _locked_folder(tmp_path / "stage"),
        ):
            pass
    with pytest.raises(ValueError, match="stage: is for folders, web servers and stores"):
        DataConfig(path="pipe:cat {}", stage="/local")
