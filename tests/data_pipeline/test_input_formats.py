"""The format of a file is told from its content; what cannot be read as asked is refused."""

from __future__ import annotations

import codecs
import csv
import errno
import gzip
import html
import io
import json
import lzma
import os
import re
import sys
import threading
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from configs.errors import OptionError
from data_pipeline import BuildOptions, Corpus, DataError, build
from data_pipeline.building.reporting import summary
from data_pipeline.text.documents import (
    Problem,
    RawChunk,
    parse,
    raw_chunks,
    read_documents,
    slice_of,
)
from data_pipeline.text.formats import ReadOptions, find_inputs
from data_pipeline.tokenization.training import train
from tests.data_pipeline.test_inputs import DOCUMENTS, GOOD, READING

RECORDS = [{"text": text, "url": f"http://a/{number}"} for number, text in enumerate(DOCUMENTS)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)


def as_csv() -> str:
    file = io.StringIO()
    csv.writer(file).writerows([["id", "text"], *enumerate(DOCUMENTS)])
    return file.getvalue()


def as_wiki() -> str:
    """The documents as wikiextractor writes them: escaped text between tags."""
    texts = [html.escape(text, quote=False) for text in ["<b> & c", *DOCUMENTS]]
    return "".join(
        f'<doc id="{number}" url="u" title="A "B" > C">\n{text}\n</doc>\n'
        for number, text in enumerate(texts)
    )


BY_CONTENT = {
    "c4-train.00000-of-00002.json.gz": gzip.compress(LINES.encode()),
    "lines.json": LINES.encode(),
    "lines.txt": codecs.BOM_UTF8 + LINES.encode(),
    "no_suffix": LINES.encode(),
    "one.json": json.dumps(RECORDS[0]).encode(),
    "array.json": json.dumps(RECORDS).encode(),
    "indented.json": json.dumps(RECORDS, indent=2).encode(),
    "objects.json": "\n".join(json.dumps(record, indent=1) for record in RECORDS).encode(),
    "texts.json.xz": lzma.compress(json.dumps(DOCUMENTS).encode()),
    "table.csv": codecs.BOM_UTF8 + b"\n" + as_csv().encode(),
    "table.tsv": b'\r\nn\ttext\r\n1\ta "b\rb\r\n\r\n2\tc\r\n',
    "wiki_00": as_wiki().encode(),
}
EXPECTED = {
    "one.json": DOCUMENTS[:1],
    "table.tsv": ['a "b\rb', "c"],
    "wiki_00": ["<b> & c", *DOCUMENTS],
}


@pytest.mark.parametrize("name", BY_CONTENT)
def test_a_format_is_told_from_the_content(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4, JSON, CSV and wikiextractor's output became one document of markup, without a word."""
    path = tmp_path / name
    path.write_bytes(BY_CONTENT[name])
    expected = EXPECTED.get(name, DOCUMENTS)
    problems: list[Problem] = []
    for size in (1 << 21, 300):
        monkeypatch.setattr("data_pipeline.text.documents.CHUNK_BYTES", size)
        assert list(read_documents([str(path)], on_problem=problems.append)) == expected
        assert list(read_documents([str(tmp_path)])) == expected, "in a folder"
        chunks: list[RawChunk] = []
        for task in range(3):
            chunks += raw_chunks(
                slice_of(find_inputs([str(path)], READING).spans, READING, task, 3), READING
            )
        assert [text for chunk in chunks for text in parse(chunk, READING).documents] == expected
    assert not problems


def test_standard_input_may_be_json_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO(LINES.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(raw)))  # type: ignore
    assert list(read_documents(["-"])) == DOCUMENTS


@pytest.mark.parametrize("text", [LINES, "\n\n".join(DOCUMENTS)])
def test_a_pipe_is_read_from_its_beginning(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that tell its format were lost: the first 4 to 8 KiB of the text."""
    reading, writing = os.pipe()
    with open(reading) as stdin, open(writing, "w") as pipe:
        pipe.write(text)
        pipe.close()
        monkeypatch.setattr(sys, "stdin", stdin)
        assert list(read_documents(["-"])) == DOCUMENTS


def test_a_pipe_that_does_not_block_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell, or a program that has the pipe too, may have set it so."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with open(reading) as stdin, open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdin", stdin)
        later = threading.Timer(0.2, lambda: (pipe.write("\n\n".join(DOCUMENTS)), pipe.close()))
        later.start()
        assert list(read_documents(["-"])) == DOCUMENTS
        later.join()


@pytest.mark.parametrize(
    ("name", "content", "field", "message"),
    [
        ("a.txt", b"One.\n\nTwo.", "body", r"a\.txt: is plain text without"),
        ("wiki_00", as_wiki().encode(), "body", "wiki_00: is plain text without"),
        ("a.csv", as_csv().encode(), "body", "a.csv: has no column 'body'; .*: id, text"),
        ("a.csv", b"id;text\n1;One.\n", None, "';' does not separate columns here: commas do"),
        ("a.csv", b"text,text\nOne.,Two.\n", None, "a.csv: has several columns 'text'"),
        ("a.json", b'{"version": 3}', None, "a.json: has no field 'text'; .* --field"),
        ("a.json", b"[1, 2", None, "a.json: has no field 'text'"),
        ("a.json", b'[{"text": "a"}, {"text": ', None, "a.json: not valid JSON"),
        ("a.csv", b'text\n"no end', None, "a.csv:2: not valid CSV"),
        ("a.csv", b"text\rSome text\r", None, "a.csv:1: not valid CSV"),
        ("a.csv", b" text\nSome text\n", None, "a.csv: has no column 'text'; .*:  text"),
        ("a.tsv", b'"text"\tn\nSome text\t1\n', None, "a.tsv: has no column 'text'; .*: \"text\""),
        ("a.txt", "Some text".encode("utf-16"), None, "a.txt: is UTF-16, not UTF-8"),
        ("a", gzip.compress(b"text", mtime=0), None, "is compressed; its name must end in .gz"),
        ("a.pdf", b"%PDF-1.5 ...", None, "a.pdf: is not text"),
        ("a.bin", bytes(99), None, "a.bin: is not text"),
        ("a.html", b"<!DOCTYPE html><p>Text", None, "a.html: is HTML or XML"),
        ("dump.xml", b"<mediawiki><page>", None, "dump.xml: is HTML or XML"),
        ("a.zip", b"PK\x03\x04 damaged", None, "a.zip: cannot be decompressed"),
    ],
)
def test_what_cannot_be_read_as_asked_is_refused(
    tmp_path: Path, name: str, content: bytes, field: str | None, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_documents([str(tmp_path / name)], ReadOptions(field=field)))


def test_nested_fields(tmp_path: Path) -> None:
    nested = [{"doc": {"text": text}} for text in DOCUMENTS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in nested))
    (tmp_path / "b.json").write_text(json.dumps(nested))
    table = pyarrow.table({"doc": [record["doc"] for record in nested]})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    flat = "".join(json.dumps({"doc.text": text}) + "\n" for text in DOCUMENTS)
    (tmp_path / "d.jsonl").write_text(flat)
    assert list(read_documents([str(tmp_path)], ReadOptions(field="doc.text"))) == DOCUMENTS * 4
    with pytest.raises(OptionError, match="--separator: is for plain text, and no input is"):
        find_inputs([str(tmp_path)], ReadOptions("###", "doc.text"))


def test_a_line_may_be_a_document(tmp_path: Path) -> None:
    text = "one\r\n\ufefftwo\n\n\ufeff\nthree"
    (tmp_path / "a.txt").write_bytes(text.encode())
    problems: list[Problem] = []
    found = [*read_documents([str(tmp_path)], ReadOptions("line"), problems.append)]
    assert (found, problems) == (["one", "two", "three"], [])


def test_a_zip_holds_one_file(tmp_path: Path) -> None:
    with zipfile.ZipFile(path := tmp_path / "a.zip", "w") as archive:
        archive.writestr("folder/a.jsonl", LINES)
        archive.writestr("__MACOSX/folder/._a.jsonl", "no text")
    assert list(read_documents([str(path)])) == DOCUMENTS
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("folder/b.jsonl", LINES)
    with pytest.raises(DataError, match=r"a.zip: must hold one file, and holds 2: folder/a.jsonl"):
        list(read_documents([str(path)]))


def test_a_zstd_file_with_a_long_window(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=28)
    writer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (path := tmp_path / "a.jsonl.zst").write_bytes(writer.compress(LINES.encode()) + writer.flush())
    assert list(read_documents([str(path)])) == DOCUMENTS


def test_skipped_files_and_unusable_documents_are_told(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "in").mkdir()
    (folder / "a.txt").write_bytes(GOOD)
    (folder / "README.md").write_text("Not of the corpus.")
    (folder / "dataset_info.json").write_text(json.dumps({"version": 1}))
    (folder / "other.csv").write_text("name,price\n1,2\n")
    options = BuildOptions([str(folder)], str(tokenizer_dir), val_fraction=0.0)
    told = summary(build(options, str(tmp_path / "out")))
    expected = "3 files skipped", "README.md: holds no records", "csv: has no column 'text'"
    assert [line for line in expected if line not in told] == []
    assert "0 unusable documents" in told
    (tmp_path / "far").mkdir()
    (folder / "gone.txt").symlink_to("nowhere.txt")
    (folder / "linked").symlink_to(tmp_path / "far")
    told = find_inputs([str(folder)], ReadOptions()).skipped
    assert [line for line in told if "gone.txt: cannot be read: No such" in line] != []
    assert [line for line in told if "linked: cannot be read: Is a directory" in line] != []
    denied = PermissionError(errno.EACCES, "Permission denied", str(folder / "locked"))
    monkeypatch.setattr("os.walk", lambda folder, onerror: onerror(denied))
    with pytest.raises(DataError, match="locked: cannot be read: Permission denied"):
        find_inputs([str(folder)], ReadOptions())
    monkeypatch.undo()
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good"}\n{"body": "b"}\n{"body": "c"}\n')
    message = r"2 of 3 documents are unusable; the first: .*bad.jsonl:2: no field 'text'"
    with pytest.raises(DataError, match=message):
        build(BuildOptions([str(bad)], str(tokenizer_dir)), str(tmp_path / "bad"))
    with pytest.raises(DataError, match=message):
        train([str(bad)], "wordpiece", 100, str(tmp_path / "tokenizer"))


ONE = "the corpus has 1 document: blank lines .* --separator line"


@pytest.mark.parametrize(
    ("copies", "separator", "fraction", "expected"),
    [
        (1, None, 0.0, f"warning: no document is held out; {ONE}$"),
        (1, None, 0.9999, f"warning: every document is held out; {ONE}$"),
        (1, "###", 0.0, "warning: all text is 1 document; check --separator$"),
        (1, "line", 1e-9, "warning: no document is held out; build again with a higher --val-f"),
        (3, None, 1e-9, "has 3 long documents.* --separator line; otherwise .* --val-fraction$"),
        (1, "line", 0.0, None),
    ],
)
def test_a_corpus_that_cannot_be_trained_on_or_scored_is_told(
    tmp_path: Path,
    tokenizer_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    copies: int,
    separator: str | None,
    fraction: float,
    expected: str | None,
) -> None:
    monkeypatch.setattr("data_pipeline.reading.corpus.LONG_DOCUMENT", 1000)
    for number in range(copies):
        (tmp_path / f"{number}.txt").write_text(f"{number} " + "\n".join(DOCUMENTS[:-2]))
    reading = ReadOptions(separator)
    inputs = [str(tmp_path / "*.txt")]
    options = BuildOptions(inputs, str(tokenizer_dir), reading, val_fraction=fraction)
    tree = build(options, out := str(tmp_path / "out"))
    warning = next((line for line in summary(tree).splitlines() if "warning" in line), None)
    assert warning == expected or re.search(str(expected), str(warning))
    if warning and separator is None:
        split = "train" if fraction > 0.5 else "val"
        with pytest.raises(DataError, match=rf"/{split}: has no documents.* --separator line"):
            Corpus.open(out).split(split)
