"""Every kind of input gives the same documents; unusable parts are counted by file and line."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import OptionError
from data_pipeline import BuildOptions, DataError, build
from data_pipeline.text.documents import (
    Problem,
    location_of,
    parse,
    raw_chunks,
    read_documents,
    slice_of,
)
from data_pipeline.text.formats import ReadOptions, find_inputs
from data_pipeline.tokenization.training import train
from tests.data_pipeline.conftest import make_documents

DOCUMENTS = [*make_documents(25, 4), "Ünïcödé — “quotes”\nand a second line.", "日本語。"]
READING = ReadOptions()
GOOD = b"".join(b"good one, %d\n\n" % number for number in range(9))


def find_files(inputs: list[str]) -> list[str]:
    return [span.path for span in find_inputs(inputs, READING).spans]


def write_all(folder: Path) -> list[Path]:
    text = "\n\n".join(DOCUMENTS) + "\n"
    lines = "".join(json.dumps({"text": one, "id": 3}) + "\n" for one in DOCUMENTS)
    paths = []
    for name, content in (("a.txt", text), ("b.jsonl", lines)):
        data = content.encode()
        for suffix, packed in (
            ("", data),
            (".gz", gzip.compress(data[:700]) + gzip.compress(data[700:])),
            (".bz2", bz2.compress(data[:800]) + bz2.compress(data[800:])),
            (".xz", lzma.compress(data)),
            (".zst", zstandard.compress(data[:900]) + zstandard.compress(data[900:])),
        ):
            paths.append(folder / f"{name}{suffix}")
            paths[-1].write_bytes(packed)
    paths.append(folder / "c.parquet")
    table = pyarrow.table({"text": DOCUMENTS, "n": list(range(len(DOCUMENTS)))})
    pyarrow.parquet.write_table(table, paths[-1], row_group_size=7)
    return paths


def test_formats_and_compressions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (1 << 21, 300):
        monkeypatch.setattr("data_pipeline.text.documents.CHUNK_BYTES", size)
        for path in write_all(tmp_path):
            assert list(read_documents([str(path)])) == DOCUMENTS, path


def test_folders_globs_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_all(tmp_path)
    (tmp_path / "notes.md").write_text("not read")
    (tmp_path / "._a.txt").write_bytes(b"\x00\x05\x16\x07 of macOS")
    (tmp_path / ".checkpoints").mkdir()
    (tmp_path / ".checkpoints" / "a.txt").write_text("not read")
    assert find_files([str(tmp_path)]) == sorted(map(str, paths))
    assert find_files([str(tmp_path / "*.jsonl*")]) == sorted(
        str(p) for p in paths if "jsonl" in p.name
    )
    folders = tmp_path / "parts" / "first", tmp_path / "parts" / "second"
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text("read")
    files = [str(folder / "a.txt") for folder in folders]
    assert find_files([str(tmp_path / "parts" / "*")]) == files  # as of a shell's glob
    assert find_files([str(tmp_path / "parts" / "**")]) == files
    shutil.rmtree(tmp_path / "parts")
    text = ("\n\n".join(DOCUMENTS)).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert list(read_documents(["-"])) == DOCUMENTS
    with pytest.raises(DataError, match="no such file or folder"):
        find_files([str(tmp_path / "*.nothing")])
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe.txt: is a pipe; write its content to a file, or"):
        find_files([str(tmp_path / "pipe.txt")])
    (tmp_path / "pipe.txt").unlink()
    (tmp_path / "hollow").mkdir()
    with pytest.raises(DataError, match="holds no text files"):
        find_files([str(tmp_path / "hollow")])
    for names, message in (
        (["-", "-"], "-: standard input can"),
        ([""], "the name is empty"),
    ):
        with pytest.raises(DataError, match=message):
            find_files(names)
    for separator in ("", "one\ntwo"):
        with pytest.raises(OptionError, match="--separator: must be one line"):
            ReadOptions(separator=separator)


def test_text_that_cannot_be_used_is_counted_with_the_first_reason(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    for name, content, message in (
        (
            "a.txt",
            "\xe9\xe9n.".encode("latin-1"),
            r"1 of 1 documents are unusable; the first: .*a\.txt:1: not valid",
        ),
        ("b.jsonl", b"{}\n[1]\n{", r"3 of 3 documents .*b\.jsonl:1: no field 'text'; .*--field"),
        ("c.txt", b"", r"c\.txt: holds no text"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            train([str(path)], "wordpiece", 100, str(tmp_path / "tokenizer"))
        with pytest.raises(DataError, match=message):
            build(
                BuildOptions([str(path)], str(tokenizer_dir)),
                str(tmp_path / name.replace(".", "-")),
            )


def test_separator_line_endings_and_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\n\r\ntwo\r\nlines\r\n\r\n\r\nthree".encode())
    assert list(read_documents([str(path)])) == ["one", "two\nlines", "three"]
    path.write_text("one\n\nstill one\n###\ntwo\n###\n###\nthree ### no\n###")
    reading = ReadOptions(separator="###")
    assert list(read_documents([str(path)], reading)) == ["one\n\nstill one", "two", "three ### no"]
    chunk = next(
        raw_chunks(slice_of(find_inputs([str(path)], reading).spans, reading, 0, 1), reading)
    )
    assert [location_of(one) for one in parse(chunk, reading).problems] == [f"{path}:7"]


@pytest.mark.parametrize("first", [b"###\n", b"\xef\xbb\xbf###\n", b" \n\n###\r\n"])
def test_a_separator_on_the_first_line_ends_no_document(tmp_path: Path, first: bytes) -> None:
    """It counted as an unusable one, and so ended a strict build."""
    path, reading = tmp_path / "a.txt", ReadOptions(separator="###")
    for text, problems in ((b"one\n###\ntwo\n###\n", 0), (b"###\none\n###\n###\ntwo", 2)):
        path.write_bytes(first + text)
        found: list[Problem] = []
        assert list(read_documents([str(path)], reading, found.append)) == ["one", "two"]
        assert len(found) == problems


BAD_TEXT = b"good one\n\nbad \xff\xfe bytes\n\n\x01\x02\n\nlast good"
BAD_LINES = (
    b'{"text": "good"}\n{"text": broken\n\n{"other": 1}\n[1]\n{"text": ""}\n{"text": 5}\n'
    b'{"text": "\\ud800 lone"}\n'
)


def test_problems_have_file_and_line(tmp_path: Path, tokenizer_dir: Path) -> None:
    (tmp_path / "a.txt").write_bytes(BAD_TEXT)
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as file:
        file.write(BAD_LINES)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x", None, " "]}), tmp_path / "c.parquet")
    (tmp_path / "d.txt").write_bytes(GOOD)
    inputs = [str(tmp_path / name) for name in ("a.txt", "b.jsonl.gz", "c.parquet", "d.txt")]
    tree = build(BuildOptions(inputs, str(tokenizer_dir), val_fraction=0.0), str(tmp_path / "out"))
    lines = tree["tally"]["first_problems"]
    assert tree["tally"]["problems"] == len(lines) == 9
    expected = [
        "a.txt:3: not valid UTF-8",
        "a.txt:5: no token in it",
        "b.jsonl.gz:2: not valid JSON",
        "b.jsonl.gz:4: no field 'text'",
        "b.jsonl.gz:5: no field 'text'",
        "b.jsonl.gz:6: empty document",
        "b.jsonl.gz:7: the text is not a string",
        "c.parquet: row 2: the text is not a string",
        "c.parquet: row 3: empty document",
    ]
    for line, end in zip(lines, expected, strict=True):
        assert line.endswith(end)
    with pytest.raises(DataError, match=r"a.txt:3: not valid UTF-8"):
        build(
            BuildOptions(inputs, str(tokenizer_dir), skip_problems=False), str(tmp_path / "strict")
        )


def test_broken_files_are_one_line(tmp_path: Path) -> None:
    for name, whole in (
        ("a.txt.gz", gzip.compress(b"text " * 9000)),
        ("a.txt.bz2", bz2.compress(b"text " * 9000)),
        ("a.txt.xz", lzma.compress(b"text " * 9000)),
        ("a.txt.zst", zstandard.compress(b"text " * 9000)),
    ):
        for data in (whole[: len(whole) // 2], b"not compressed at all"):
            path = tmp_path / name
            path.write_bytes(data)
            with pytest.raises(DataError, match=name):
                list(read_documents([str(path)]))
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=r"a\.parquet: not a readable Parquet"):
        list(read_documents([str(path)]))
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), path)
    with pytest.raises(DataError, match="no column 'text'"):
        list(read_documents([str(path)]))


def test_parquet_rows_that_are_not_utf_8_are_problems(tmp_path: Path) -> None:
    texts = [b"one", b"caf\xe9", None, b"", b"two"]
    sizes = [0, *(len(text or b"") for text in texts)]
    offsets = pyarrow.py_buffer(np.cumsum(sizes, dtype="i4").tobytes())
    data = pyarrow.py_buffer(b"".join(text or b"" for text in texts))
    is_there = pyarrow.py_buffer(bytes([0b11011]))
    column = pyarrow.StringArray.from_buffers(len(texts), offsets, data, is_there)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path := tmp_path / "a.parquet")
    problems: list[Problem] = []
    assert list(read_documents([str(path)], on_problem=problems.append)) == ["one", "two"]
    assert [(one.position, one.reason) for one in problems] == [
        (1, "not valid UTF-8"),
        (2, "the text is not a string"),
        (3, "empty document"),
    ]


@given(
    st.lists(st.sampled_from(["a", "bc d", "e\nf", "g" * 40]), min_size=1, max_size=40),
    st.lists(st.sampled_from(["\n\n", "\n \n", "\n\n\n\n", "\r\n\r\n", "\n\t\n\n"]), min_size=40),
    st.integers(1, 9),
    st.integers(3, 200),
)
@settings(max_examples=60)
def test_any_slicing_gives_the_same_documents(tmp_path_factory, texts, gaps, tasks, size) -> None:
    folder = tmp_path_factory.mktemp("slices")
    joined = "".join(text + gap for text, gap in zip(texts, gaps, strict=False))
    (folder / "a.txt").write_bytes(joined.encode())
    (folder / "b.jsonl").write_text("\n".join(json.dumps({"text": one}) for one in texts))
    (folder / "c.txt").write_text("\n##\n".join(texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_pipeline.text.documents.CHUNK_BYTES", size)
        patch.setattr("data_pipeline.text.documents.LONGEST_BOUNDARY", 8)
        for name, reading in (
            ("a.txt", READING), ("b.jsonl", READING), ("c.txt", ReadOptions(separator="##")),
            ("", READING),
        ):  # fmt: skip
            inputs = [str(folder / name)]
            whole = list(read_documents(inputs, reading))
            parts = [
                document
                for task in range(tasks)
                for chunk in raw_chunks(
                    slice_of(find_inputs(inputs, reading).spans, reading, task, tasks), reading
                )
                for document in parse(chunk, reading).documents
            ]
            assert parts == whole
            if name:
                assert whole == texts


@pytest.mark.timeout(60)  # what is linear would else take hours
def test_long_documents_and_lines_take_no_longer(tmp_path: Path) -> None:
    texts = ["word " * 200_000, "word\n" * 200_000]
    (tmp_path / "a.txt").write_text("\n\n".join([*texts, "end"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_pipeline.text.documents.CHUNK_BYTES", 1 << 12)
        parts = [
            len(document)
            for task in range(3)
            for chunk in raw_chunks(
                slice_of(find_inputs([str(tmp_path)], READING).spans, READING, task, 3), READING
            )
            for document in parse(chunk, READING).documents
        ]
    assert parts == [*(len(text.strip()) for text in texts), 3]


class CountedSize(int):
    """A size of a file that counts how often one is added to another number."""

    additions = 0

    def __add__(self, other: int) -> CountedSize:
        CountedSize.additions += 1
        return CountedSize(int(self) + int(other))

    __radd__ = __add__


def test_the_slices_of_many_files_cost_an_addition_each(tmp_path: Path, monkeypatch) -> None:
    (path := tmp_path / "a.txt").write_text("one\n\ntwo\n")
    monkeypatch.setattr("os.path.getsize", lambda path: CountedSize(9))
    spans = slice_of(find_inputs([str(path)] * 200, READING).spans, READING, 1, 4)
    assert (len(spans), CountedSize.additions < 400) == (50, True)


def test_slices_of_nothing_are_empty(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    for task in range(3):
        assert not list(
            raw_chunks(
                slice_of(find_inputs([str(tmp_path)], READING).spans, READING, task, 3), READING
            )
        )
