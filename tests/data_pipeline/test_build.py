"""Building: the same bytes however the work is divided, and nothing lost when it is interrupted."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import UserError
from data_pipeline import BuildOptions, Corpus, DataError, build
from data_pipeline.building import build as building
from data_pipeline.building import encoding
from data_pipeline.building.encoding import EncodedChunk, digest
from data_pipeline.text.documents import RawChunk
from data_pipeline.text.formats import FileSpan
from tests.data_pipeline.conftest import make_documents
from tests.waiting import until

OPTIONS: dict = {"shard_mb": 0.02, "block_bytes": 4000, "val_fraction": 0.1}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "corpus.json"
    }


def documents_of(corpus: Corpus) -> dict[str, list[tuple[int, ...]]]:
    """The ids of each document in order, for each split that has any."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for name in ("train", "val"):
        split = corpus.split(name)
        found[name] = []
        for number in range(len(split.index.blocks)):
            block = split.read_block(number)
            ends = np.cumsum(block.sentences)[np.cumsum(block.documents) - 1]
            parts = [tuple(one.tolist()) for one in np.split(block.tokens, ends)[:-1]]
            if split.index.blocks[number]["continues"]:
                found[name][-1] += parts.pop(0)
            found[name] += parts
    return found


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.text.documents.CHUNK_BYTES", 5000)


def test_workers_change_no_byte(
    tmp_path: Path, text_file: Path, tokenizer_dir: Path, small_chunks, monkeypatch
) -> None:
    own: list[EncodedChunk] = []

    class Encoder(encoding.Encoder):
        """Of this process."""

        def __call__(self, chunk: RawChunk) -> EncodedChunk:
            own.append(super().__call__(chunk))
            return own[-1]

    monkeypatch.setattr(encoding, "Encoder", Encoder)
    for workers in (1, 2):
        seen: list[building.Progress] = []

        def on_progress(progress: building.Progress, workers=workers, seen=seen) -> None:
            seen.append(progress)
            until(lambda: len(multiprocessing.active_children()) >= workers - 1, "the workers")
            time.sleep(0.05 * (workers - 1))  # in which the other one has time for a chunk

        own.clear()
        options = BuildOptions([str(text_file)], str(tokenizer_dir), **OPTIONS)
        build(options, str(tmp_path / str(workers)), workers, on_progress)
        done = [one.bytes_done for one in seen]
        assert len(done) > 3
        assert done == sorted(done)
        assert done[-1] == seen[-1].bytes_total == text_file.stat().st_size
        assert seen[-1].documents == 300
        assert (len(own) < len(seen)) == (workers > 1)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def test_the_work_for_a_file_does_not_grow_with_their_number(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To tell its progress, a build asked each file for its size after each file."""
    for number, text in enumerate(make_documents(60)):
        (tmp_path / f"{number}.txt").write_text(text)
    asked: list[FileSpan] = []
    monkeypatch.setattr(FileSpan, "bytes", property(lambda span: asked.append(span) or span.size))
    options = BuildOptions([str(tmp_path)], str(tokenizer_dir), **OPTIONS)
    told: list[building.Progress] = []
    build(options, str(tmp_path / "out"), 1, told.append)
    assert len(asked) <= 3 * 60
    assert [progress.bytes_done for progress in told] == sorted(p.bytes_done for p in told)
    assert told[-1].bytes_done == told[-1].bytes_total > 0


def test_a_worker_that_dies_is_one_line(
    tmp_path: Path, text_file: Path, tokenizer_dir: Path, small_chunks
) -> None:
    killed = []

    def kill_it(_: building.Progress) -> None:
        if not killed:  # another chunk of this process may come before the build notices
            until(multiprocessing.active_children, "a worker")
            killed.append(multiprocessing.active_children()[0])
            killed[0].kill()
            killed[0].join(60)

    options = BuildOptions([str(text_file)], str(tokenizer_dir), **OPTIONS)
    with pytest.raises(DataError, match=r"a tokenizing process died.* fewer --workers"):
        build(options, str(tmp_path / "out"), workers=3, on_progress=kill_it)
    until(lambda: not multiprocessing.active_children(), "the other one to end too")


@pytest.mark.parametrize(
    "stops", [(3, 4), *(pytest.param(it, marks=pytest.mark.slow) for it in ((1,), (2, 5, 11)))]
)
def test_an_interrupted_build_goes_on_to_the_same_bytes(
    tmp_path: Path, text_file: Path, tokenizer_dir: Path, small_chunks, monkeypatch, stops
) -> None:
    """Killed in the middle of a chunk, some time after the last journal entry."""
    arguments = ([str(text_file)], str(tokenizer_dir))
    build(BuildOptions(*arguments, **OPTIONS), str(tmp_path / "whole"))
    journalled = iter(range(10**9))
    monkeypatch.setattr(building, "JOURNAL_SECONDS", -1.0)
    take = building._Build._take
    save = building._Build._save
    monkeypatch.setattr(
        building._Build,
        "_save",
        lambda self: save(self) if next(journalled) % 3 == 0 else None,
    )
    for stop in stops:

        def killed(self, chunk, stop=stop):
            take(self, chunk)
            if self.tally.chunks > stop:
                raise KeyboardInterrupt

        monkeypatch.setattr(building._Build, "_take", killed)
        with pytest.raises(KeyboardInterrupt):
            build(BuildOptions(*arguments, **OPTIONS), str(tmp_path / "parts"))
        assert not (tmp_path / "parts" / "corpus.json").exists()
    monkeypatch.setattr(building._Build, "_take", take)
    build(BuildOptions(*arguments, **OPTIONS), str(tmp_path / "parts"))
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")
    tree = [(tmp_path / one / "corpus.json").read_text() for one in ("whole", "parts")]
    assert tree[0] == tree[1]


def test_two_builds_in_one_folder_are_not_at_work_at_once(
    tmp_path: Path, text_file: Path, tokenizer_dir: Path, monkeypatch
) -> None:
    options = BuildOptions([str(text_file)], str(tokenizer_dir), **OPTIONS)
    out = str(tmp_path / "out")
    take, refused = building._Build._take, []

    def second(self, chunk):
        monkeypatch.setattr(building._Build, "_take", take)
        with pytest.raises(DataError, match="another build is running there") as caught:
            build(options, out)
        refused.append(str(caught.value))
        take(self, chunk)

    monkeypatch.setattr(building._Build, "_take", second)
    build(options, out, workers=2)
    assert [line.partition(":")[0] for line in refused] == [out]
    assert build(options, out)["tally"]["documents"] == 300
    assert not (tmp_path / "out" / ".build").exists()


BUILD = """
import sys, data_pipeline.building.build as b
b.JOURNAL_SECONDS = 0.05
options = dict(shard_mb=0.2, block_bytes=20000, val_fraction=0.1)
if __name__ == "__main__":
    b.build(b.BuildOptions(sys.argv[1:2], sys.argv[2], **options), sys.argv[3], int(sys.argv[4]))
"""


def wait_for_the_end(group: int) -> None:
    """Wait until no process of a group is left."""
    for _ in range(300):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("a killed build leaves processes behind")


@pytest.mark.slow
def test_kill_9_at_any_time(tmp_path: Path, tokenizer_dir: Path) -> None:
    """With one process, and with workers, which end with the process that started them."""
    few, text = tmp_path / "few.txt", tmp_path / "big.txt"
    few.write_text("\n\n".join(make_documents(40, 7)))
    text.write_text("\n\n".join(make_documents(24000, 7)))
    (tmp_path / "build.py").write_text(BUILD)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}

    def command(text: Path, out: str, processes: int) -> list[str]:
        words = [tmp_path / "build.py", text, tokenizer_dir, tmp_path / out, processes]
        return [sys.executable, *map(str, words)]

    def seconds(text: Path, out: str) -> float:
        begun = time.monotonic()
        subprocess.run(command(text, out, 1), check=True, env=environment, timeout=300)
        return time.monotonic() - begun

    start = seconds(few, "few")
    work = seconds(text, "whole") - start
    kills = 0
    for attempt in range(12):
        process = subprocess.Popen(
            command(text, "killed", 1 + attempt % 2), env=environment, start_new_session=True
        )
        time.sleep(0.9 * start + work * (0.1 + 0.04 * (attempt % 7)))
        if process.poll() is not None:  # on a machine that has become less busy
            assert process.returncode == 0
            shutil.rmtree(tmp_path / "killed")
            continue
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
        wait_for_the_end(process.pid)
        kills += 1
    seconds(text, "killed")
    assert kills > 2
    assert contents(tmp_path / "whole") == contents(tmp_path / "killed")


def test_the_same_command_on_a_finished_corpus_changes_nothing(
    tmp_path: Path, text_file: Path, tokenizer_dir: Path
) -> None:
    options = BuildOptions([str(text_file)], str(tokenizer_dir), **OPTIONS)
    out = str(tmp_path / "out")
    first = build(options, out)
    before = contents(tmp_path / "out")
    assert build(options, out) == first
    assert contents(tmp_path / "out") == before
    with pytest.raises(DataError, match="already holds another corpus"):
        build(dataclasses.replace(options, val_fraction=0.2), out)


@pytest.mark.slow
def test_a_build_does_not_go_on_with_other_text(
    tmp_path: Path, text_file: Path, tokenizer_dir: Path, small_chunks, monkeypatch
) -> None:
    """Text of the same name and size, or from standard input, where neither helps."""
    text, take = text_file.read_bytes(), building._Build._take

    def build_of(name: str, text: bytes, stop: int) -> dict:
        def killed(self, chunk):
            take(self, chunk)
            if self.tally.chunks > stop:
                raise KeyboardInterrupt

        (tmp_path / "in.txt").write_bytes(text)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        monkeypatch.setattr(building._Build, "_take", killed)
        return build(BuildOptions([name], str(tokenizer_dir), **OPTIONS), str(tmp_path / name[-1]))

    monkeypatch.setattr(building, "JOURNAL_SECONDS", -1.0)
    other = text.replace(b"river", b"house", 1)
    for name, others in ((str(tmp_path / "in.txt"), [other]), ("-", [other, text[:99]])):
        with pytest.raises(KeyboardInterrupt):
            build_of(name, text, 4)
        for changed in others:
            with pytest.raises(DataError, match="holds an unfinished build of other text than"):
                build_of(name, changed, 10**9)
        assert build_of(name, text, 10**9)["tally"]["documents"] == 300
        assert build_of(name, text, 0)["tally"]["documents"] == 300
        with pytest.raises(DataError, match="already holds another corpus"):
            build_of(name, other, 0)


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".jsonl", ".parquet"])
def test_a_finished_corpus_is_not_that_of_changed_text(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch, suffix: str
) -> None:
    """Text that was only copied is the same; unchanged text is not even read again."""
    path = tmp_path / f"in{suffix}"
    path.write_bytes(as_file(suffix, "one river"))
    options, out = BuildOptions([str(path)], str(tokenizer_dir), **OPTIONS), str(tmp_path / "out")
    first = build(options, out)
    with monkeypatch.context() as patched:
        patched.setattr(building, "raw_chunks", None)
        assert build(options, out) == first
    path.write_bytes(as_file(suffix, "one river"))
    assert build(options, out) == first
    (tmp_path / "other").write_bytes(as_file(suffix, "one house"))
    os.utime(tmp_path / "other", (0, 0))  # of older date than the corpus
    (tmp_path / "other").replace(path)
    with pytest.raises(DataError, match="already holds another corpus"):
        build(options, out)


def as_file(suffix: str, text: str) -> bytes:
    """A file of one document; its size depends only on how long that is."""
    if suffix == ".parquet":
        table, file = pyarrow.table({"text": [text]}), io.BytesIO()
        pyarrow.parquet.write_table(table, file, compression="none")
        return file.getvalue()
    if suffix == ".jsonl":
        return json.dumps({"text": text}).encode()
    return gzip.compress(text.encode(), 0) if suffix == ".txt.gz" else text.encode()


def test_duplicates_are_dropped_once_and_counted(
    make_corpus: Callable[..., Corpus], tokenizer_dir: Path, tmp_path: Path
) -> None:
    documents = make_documents(40)
    corpus, same = make_corpus(documents + documents[:15]), make_corpus(documents)
    assert documents_of(corpus) == documents_of(same)
    assert corpus.content == same.content != make_corpus(documents[1:]).content
    (tmp_path / "in.txt").write_text("\n\n".join(documents + documents[:15]))
    for keep in (False, True):
        inputs = [str(tmp_path / "in.txt")]
        options = BuildOptions(inputs, str(tokenizer_dir), drop_duplicates=not keep)
        tree = build(options, str(tmp_path / f"{keep}"))
        assert tree["tally"]["duplicates"] == (0 if keep else 15)
        assert tree["tally"]["documents"] == (55 if keep else 40)
        assert sum(tree["tally"]["tokens_per_document"]) == tree["tally"]["documents"]


def test_the_split_is_decided_by_the_document_alone(make_corpus: Callable[..., Corpus]) -> None:
    documents = make_documents(200)
    all_of_them = set(documents_of(make_corpus(documents))["val"])
    some = set(documents_of(make_corpus(documents[100:] + make_documents(50, 9)))["val"])
    other = set(documents_of(make_corpus(make_documents(50, 9) + documents[:2]))["val"])
    assert some & all_of_them
    assert some <= all_of_them | other
    assert digest("a") != digest("b")


@given(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.integers(100, 2000))
@settings(max_examples=10)
def test_blocks_and_shards_hold_all_documents_in_order(
    make_corpus: Callable[..., Corpus], sizes: list[int], block_bytes: int
) -> None:
    documents = [f"{number} " + "river stone. " * size for number, size in enumerate(sizes)]
    corpus = make_corpus(documents, val_fraction=0.0, block_bytes=block_bytes, shard_mb=0.003)
    split = corpus.split("train")
    assert split.index.documents == len(documents)
    folder = split.folder
    names = sorted(path.name for path in folder.glob("shard-*.tar"))
    assert len(names) == len(split.index.shards)
    assert not list(folder.glob(".*"))


def test_mistakes_are_one_line(tmp_path: Path, text_file: Path, tokenizer_dir: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    cases = [
        ([str(tmp_path / "none.txt")], tokenizer_dir, {}, "none.txt: no such file"),
        ([str(tmp_path / "empty.txt")], tokenizer_dir, {}, "holds no text"),
        ([str(text_file)], tmp_path, {}, "holds no tokenizer"),
        ([str(text_file)], tokenizer_dir, {"val_fraction": 1.5}, "--val-fraction"),
        ([str(text_file)], tokenizer_dir, {"task": 5, "tasks": 3}, "--task 5/3"),
    ]
    for inputs, tokenizer, options, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            build(BuildOptions(inputs, str(tokenizer), **options), str(tmp_path / "out"))
        assert "\n" not in str(caught.value)


def test_a_full_disk_is_one_line(text_file: Path, tokenizer_dir: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    from data_pipeline.shards.writing import disk_errors

    def fill() -> None:
        with disk_errors(Path("/dev/full")), open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")

    with pytest.raises(DataError, match="the disk is full"):
        fill()


def test_ctrl_c_ends_a_build_with_one_line(tmp_path: Path, tokenizer_dir: Path) -> None:
    """All processes get the signal at once, as from a terminal."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("\n\n".join(make_documents(40000, 7)))
    command = [sys.executable, "-m", "tandem", "data", "build", text]
    process = subprocess.Popen(
        [*command, "--tokenizer", tokenizer_dir, "--out", out, "--workers", "2"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    until((out / "train").exists, "the first shard")
    time.sleep(0.7)  # others are at work
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert said.splitlines()[-1] == "tandem: interrupted"
    # Python ends by the signal where that interrupts an `exec` of source text, as in a dataclass.
    assert process.returncode in (1, -signal.SIGINT)
    assert "Traceback" not in said
    assert not (out / "corpus.json").exists()
