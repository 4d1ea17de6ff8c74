"""WebDataset tars, the output of commands, and files behind URLs are read as files on disk are."""

from __future__ import annotations

import functools
import gzip
import http.server
import io
import json
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import webdataset

from configs.errors import OptionError
from data_pipeline import BuildOptions, DataError, build
from data_pipeline.building.build import _Build
from data_pipeline.building.merging import merge
from data_pipeline.text.documents import Problem, parse, raw_chunks, read_documents, slice_of
from data_pipeline.text.formats import ReadOptions, find_inputs
from data_pipeline.tokenization.training import train
from tests.data_pipeline.test_inputs import DOCUMENTS, READING
from tests.data_pipeline.test_ranges import Server

LINES = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)


def write_tars(folder: Path, kind: str = "txt", shards: int = 3, suffix: str = "") -> list[str]:
    """Shards of `webdataset.ShardWriter`, or of its `TarWriter` where they are compressed."""
    names = [str(folder / f"{kind}-{number:04d}.tar{suffix}") for number in range(shards)]
    size = -(-len(DOCUMENTS) // shards)
    for number, name in enumerate(names):
        with webdataset.TarWriter(name) as sink:
            for at, text in enumerate(DOCUMENTS[number * size : (number + 1) * size]):
                content = {"doc": {"body": text}, "text": text} if kind == "json" else text
                sink.write({"__key__": f"{number}/{at:06d}", kind: content, "cls": 3})
    return names


@pytest.mark.parametrize(
    ("kind", "suffix", "field"),
    [
        ("txt", "", None),
        ("txt", ".gz", "txt"),
        ("json", "", None),
        ("json", "", "doc.body"),
        ("page.txt", "", "page.txt"),
    ],
)
def test_tars_of_webdataset_are_read(
    tmp_path: Path, kind: str, suffix: str, field: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.text.records.ROWS", 4)
    names, reading = write_tars(tmp_path, kind, 3, suffix), ReadOptions(field=field)
    pattern = names[0].replace("0000", "{0000..0002}")
    commands = [f"pipe:cat {name}" for name in names]
    for inputs in (names, [pattern], [str(tmp_path)], commands, [f"pipe:cat {pattern}"]):
        assert list(read_documents(inputs, reading)) == DOCUMENTS, inputs
        parts = [
            text
            for task in range(2)
            for chunk in raw_chunks(
                slice_of(find_inputs(inputs, reading).spans, reading, task, 2), reading
            )
            for text in parse(chunk, reading).documents
        ]
        assert parts == DOCUMENTS


def test_shards_of_webdatasets_own_writer_become_a_corpus(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With workers, in slices, and after an interruption the corpus is the same to the last bit."""
    monkeypatch.setattr("data_pipeline.text.records.ROWS", 4)
    (folder := tmp_path / "in").mkdir()
    with webdataset.ShardWriter(f"{folder}/a-%04d.tar", maxcount=9, verbose=0) as sink:
        for number, text in enumerate([*DOCUMENTS, DOCUMENTS[0]]):
            sink.write({"__key__": f"{number:06d}", "json": {"text": text}})
        sink.write({"__key__": "x1", "json": b"{"})
        sink.write({"__key__": "x2", "txt": b"\xff"})
        sink.write({"__key__": "x3", "cls": 1})
    options = {"tokenizer_dir": str(tokenizer_dir), "val_fraction": 0.2}
    inputs = [f"{folder}/a-{{0000..0003}}.tar"]
    expected = build(BuildOptions(inputs, **options), str(tmp_path / "one"))
    assert expected["tally"]["documents"] == len(DOCUMENTS)
    assert (expected["tally"]["duplicates"], expected["tally"]["problems"]) == (1, 3)
    reasons = [line.partition(": row ")[2] for line in expected["tally"]["first_problems"]]
    assert reasons == ["2: not valid JSON", "3: not valid UTF-8", "4: no field 'text'"]
    two = build(BuildOptions(inputs, **options), str(tmp_path / "two"), workers=2)
    assert two["files"] == expected["files"]
    for task in range(2):
        build(BuildOptions(inputs, **options, task=task, tasks=2), str(tmp_path / "parts"))
    merged = merge(str(tmp_path / "parts"))
    assert merged["splits"]["train"]["tokens"] == expected["splits"]["train"]["tokens"]
    assert merged["tally"]["problems"] == 3
    monkeypatch.setattr("data_pipeline.building.build.JOURNAL_SECONDS", 0.0)
    finish = _Build._finish
    monkeypatch.setattr(_Build, "_finish", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build(BuildOptions(inputs, **options), str(tmp_path / "killed"))
    monkeypatch.setattr(_Build, "_finish", finish)
    resumed = build(BuildOptions(inputs, **options), str(tmp_path / "killed"))
    assert resumed["files"] == expected["files"]


def write_members(path: Path, members: list[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def test_tars_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    write_members(path := tmp_path / "a.tar", [("a.jpg", b"x"), ("a.cls", b"1"), ("b.jpg", b"x")])
    with pytest.raises(DataError, match=r"a.tar: its samples have no member json, text or txt;"):
        find_inputs([str(path)], READING)
    write_members(path, [("a.txt", b"x" * 4000)])
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataError, match=r"a.tar: not a readable tar file: unexpected end"):
        list(read_documents([str(path)]))
    write_members(path, [("a.txt", b"one"), ("a.txt", b"again"), ("b.txt", b"two")])
    problems: list[Problem] = []
    assert list(read_documents([str(path)], on_problem=problems.append)) == ["one", "two"]
    assert [problem.reason for problem in problems] == ["a second member of its name"]


def test_the_output_of_a_command_may_be_anything_and_must_be_complete(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("\n\n".join(DOCUMENTS).encode()))
    assert list(read_documents([f"pipe:cat {tmp_path}/a.txt.gz"])) == DOCUMENTS
    (tmp_path / "a.jsonl").write_text(LINES)
    assert list(read_documents([f"pipe:cat {tmp_path}/a.jsonl"])) == DOCUMENTS
    with pytest.raises(DataError, match="the command has ended with status 3"):
        list(read_documents([f"pipe:cat {tmp_path}/a.jsonl; exit 3"]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Every kind of file, in a folder with a hidden one."""
    (folder := tmp_path / "in").mkdir()
    text = "\n\n".join(DOCUMENTS).encode()
    (folder / "a.txt").write_bytes(text)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    pyarrow.parquet.write_table(pyarrow.table({"text": DOCUMENTS}), folder / "c.parquet")
    with zipfile.ZipFile(folder / "d.zip", "w") as archive:
        archive.writestr("a.txt", text)
    write_tars(folder, shards=1)
    (folder / ".hidden.txt").write_text("not read")
    (folder / "notes.md").write_text("not read")
    return folder


@pytest.fixture(params=["memory", "http", "file"])
def url(request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    """A URL of the files of `folder`."""
    if request.param == "file":
        yield f"file://{folder}"
    elif request.param == "memory":
        system = fsspec.filesystem("memory")
        for path in folder.iterdir():
            system.pipe_file(f"/in/{path.name}", path.read_bytes())
        yield "memory://in"
        system.rm("/in", recursive=True)
    else:
        pytest.importorskip("aiohttp")
        Server.parts, Server.fails = [], []
        handler = functools.partial(Server, directory=str(folder.parent))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}/in/"
            server.shutdown()


def test_files_behind_urls_are_read_as_those_on_disk(url: str, folder: Path) -> None:
    base = url.rstrip("/")
    for name in ("a.txt", "b.jsonl.gz", "c.parquet", "d.zip", "txt-0000.tar"):
        assert list(read_documents([f"{base}/{name}"])) == DOCUMENTS, name
    inputs = find_inputs([url], READING)
    names = ["a.txt", "b.jsonl.gz", "c.parquet", "d.zip", "txt-0000.tar"]
    assert [span.path.rpartition("/")[2] for span in inputs.spans] == names
    assert [line.rpartition("/")[2].partition(":")[0] for line in inputs.skipped] == ["notes.md"]
    sizes = [(folder / name).stat().st_size for name in names]
    assert [span.size for span in inputs.spans] == sizes
    assert list(read_documents([f"{base}/*.tar"])) == DOCUMENTS
    assert list(read_documents([f"{base}/{{a,b}}.*"])) == DOCUMENTS * 2
    with pytest.raises(DataError, match=r"no such file|cannot be read"):
        list(read_documents([f"{base}/none.txt"]))


def test_a_corpus_and_a_tokenizer_are_made_from_urls(
    url: str, folder: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    name = f"{url.rstrip('/')}/b.jsonl.gz"
    options = {"tokenizer_dir": str(tokenizer_dir), "val_fraction": 0.2}
    local = build(BuildOptions([str(folder / "b.jsonl.gz")], **options), str(tmp_path / "a"))
    remote = build(BuildOptions([name], **options), str(tmp_path / "b"), workers=2)
    assert remote["files"] == local["files"]
    again = build(BuildOptions([name], **options), str(tmp_path / "b"))
    assert again == remote, "the finished corpus"
    for place, source in (("c", name), ("d", str(folder / "b.jsonl.gz"))):
        train([source], "wordpiece", 300, str(tmp_path / place))
    vocabularies = [(tmp_path / place / "tokenizer.json").read_bytes() for place in "cd"]
    assert vocabularies[0] == vocabularies[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("s3://bucket/a.txt", "s3://bucket/a.txt: cannot be read: Install s3fs"),
        ("nope://a.txt", "nope://a.txt: cannot be read: Protocol not known: nope"),
        ("memory://none/a.txt", "memory://none/a.txt: no such file or folder"),
        ("http://127.0.0.1:1/a.txt", "http://127.0.0.1:1/a.txt: cannot be read: .*onnect"),
        ("pipe:exit 3", "pipe:exit 3: cannot be read: the command has ended with status 3"),
    ],
)
def test_what_cannot_be_reached_is_one_line(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if not installed
    with pytest.raises(DataError, match=message):
        list(read_documents([name]))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(DataError, match=r"needs `pip install 'tandem-distill\[remote\]'`"):
        find_inputs(["memory://a"], READING)
    with pytest.raises(OptionError, match="--out s3://b/c: must be a folder of this machine"):
        build(BuildOptions([str(tmp_path)], "tokenizer"), "s3://b/c")


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_folder_of_the_library_datasets_is_read(tmp_path: Path, is_stream: bool) -> None:
    """Laid out as `Dataset.save_to_disk` writes it: streams of Arrow beside two JSON files."""
    table = pyarrow.table({"n": range(len(DOCUMENTS)), "doc": [{"text": t} for t in DOCUMENTS]})
    write = pyarrow.ipc.new_stream if is_stream else pyarrow.ipc.new_file
    for number, rows in enumerate((table[:9], table[9:])):
        with write(str(tmp_path / f"data-{number:05d}-of-00002.arrow"), rows.schema) as writer:
            writer.write_table(rows, max_chunksize=5)
    (tmp_path / "dataset_info.json").write_text(json.dumps({"features": {"text": {}}}))
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "text"}]}))
    inputs = find_inputs([str(tmp_path)], ReadOptions(field="doc.text"))
    assert (len(inputs.spans), inputs.skipped) == (2, [])
    assert list(read_documents([str(tmp_path)], ReadOptions(field="doc.text"))) == DOCUMENTS
    with pytest.raises(DataError, match=r"^[^:]*arrow: has no column 'text'; name one .*: n, doc"):
        list(read_documents([str(tmp_path)]))
    (tmp_path / "data-00000-of-00002.arrow").write_bytes(b"no arrow at all")
    with pytest.raises(DataError, match="not a readable Arrow file"):
        list(read_documents([str(tmp_path)], ReadOptions(field="doc.text")))
