"""The format of a file of documents, told from its first bytes, and the files that are read."""

from __future__ import annotations

import codecs
import csv
import glob
import io
import json
import os
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from configs.errors import OptionError
from data_pipeline.errors import DataError
from data_pipeline.remote import find_remote, is_remote
from data_pipeline.text import text_files

csv.field_size_limit(2**31 - 1)  # the library's own limit is 131,072 characters

TEXT, JSONL, WIKI = "text", "jsonl", "wiki"
JSON, CSV, TSV, PARQUET, ARROW, TAR = "json", "csv", "tsv", "parquet", "arrow", "tar"
RECORDS = (JSON, CSV, TSV, PARQUET, ARROW, TAR)  # read row by row, by one process
SUFFIXES = {
    **dict.fromkeys((".txt", ".text"), TEXT),
    **dict.fromkeys((".jsonl", ".ndjson"), JSONL),
    **{".json": JSON, ".csv": CSV, ".tsv": TSV, ".parquet": PARQUET, ".arrow": ARROW},
    **dict.fromkeys((".tar", ".tgz"), TAR),
}
ARROW_MAGIC = b"ARROW1"
DATASET_FACTS = ("dataset_info.json", "state.json")  # beside the Arrow files of `datasets`
TAR_MAGIC = slice(257, 262)
TEXT_MEMBERS = ("txt", "text")  # of a sample in a tar file, unless a field is named
LINE = "line"  # the separator that makes a document of each line
HEAD_BYTES = 1 << 16
DEFAULT_FIELD = "text"

_MANY_NULS = 0.01  # of the first bytes: more are in no text of one byte or UTF-8
_WIDE = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
_OBJECT = re.compile(rb'\{\s*["}]')
_ARRAY = re.compile(rb'\[\s*(?:\{\s*["}]|"|\])')
_WIKI_DOCUMENT = re.compile(rb"<doc\b[^\n]*>")
_MARKUP = re.compile(rb"<(?:!doctype|html|\?xml|mediawiki)\b", re.I)


@dataclass(frozen=True)
class ReadOptions:
    """How files are split into documents.

    `separator` is the line between two documents of plain text; None means blank lines, `LINE` that
    each line is a document. `field` is the key or column that holds the text, ``a.b`` for one in a
    nested object; None means `DEFAULT_FIELD`, and allows files without fields.
    """

    separator: str | None = None
    field: str | None = None

    def __post_init__(self) -> None:
        if self.separator is not None and (not self.separator or "\n" in self.separator):
            raise OptionError("--separator: must be one line, and not empty")

    @property
    def text_field(self) -> str:
        """The key or column that is read."""
        return DEFAULT_FIELD if self.field is None else self.field


@dataclass(frozen=True)
class FileSpan:
    """A whole file, or the bytes of an uncompressed file between two document starts."""

    path: str
    kind: str
    size: int | None = None  # of the file, in bytes as it is stored; None of a stream
    start: int = 0
    end: int | None = None

    @classmethod
    def of(cls, path: str, kind: str) -> FileSpan:
        """All of a file."""
        return cls(path, kind, text_files.file_size(path))

    @property
    def bytes(self) -> int:
        """The size of this part of the file; 0 of a stream."""
        end = self.size if self.end is None else self.end
        return 0 if end is None else end - self.start


@dataclass
class Inputs:
    """The files to read, in order, and those of folders that are not read, each with the reason."""

    spans: list[FileSpan] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def find_inputs(inputs: Sequence[str], reading: ReadOptions) -> Inputs:
    """The files that `inputs` name, in order; matches of a folder or glob are sorted by name.

    `inputs` are files, folders, globs, URLs, brace patterns, ``pipe:`` commands, or ``-`` for
    standard input. Of a folder, files with a suffix of text are read, and others that hold records
    or wikiextractor's documents. Raises DataError when one of them matches nothing, when a file
    that is named cannot be read as asked, and when standard input is named twice.
    """
    if [*inputs].count(text_files.STDIN) > 1:
        raise DataError(f"{text_files.STDIN}: standard input can be read only once; name it once")
    result = Inputs()
    for name in inputs:
        if not name:
            raise DataError("input: the name is empty; name a file, folder or glob with text")
        for part in _expanded(name):
            paths, is_folder = find_remote(part) if is_remote(part) else _find_local(part)
            if is_folder:
                _add_folder(result, part, paths, reading)
            elif not paths:
                text_files.refuse_pipe(part)
                raise DataError(f"{part}: no such file or folder")
            else:
                result.spans += [FileSpan.of(path, format_of(path, reading)) for path in paths]
    if reading.separator is not None and all(span.kind != TEXT for span in result.spans):
        raise OptionError("--separator: is for plain text, and no input is; remove it")
    return result


def _expanded(name: str) -> list[str]:
    """The names that a glob stands for, or a brace pattern of `webdataset`: ``{0000..0012}.tar``.

    As a shell's, a glob stands for folders too. With ``**`` it is for the files within.
    """
    if name == text_files.STDIN or os.path.exists(name):
        return [name]
    names = [name]
    if re.search(r"\{.*(,|\.\.).*\}", name):
        from webdataset.shardlists import expand_urls  # imports torch, which a build does not need

        names = [*expand_urls(name)]
    return [path for part in names for path in _matches(part) or [part]]


def _matches(pattern: str) -> list[str]:
    """The files and folders that a glob stands for, sorted as strings; none if it is no glob."""
    if is_remote(pattern) or os.path.exists(pattern):
        return []
    paths = sorted(glob.glob(pattern, recursive=True))
    folders = "**" not in pattern
    return [path for path in paths if os.path.isfile(path) or (folders and os.path.isdir(path))]


def _find_local(name: str) -> tuple[list[str], bool]:
    """The paths that a name stands for, and whether it is that of a folder.

    They are sorted as strings: another order makes another corpus.
    """
    if os.path.isdir(name):
        return sorted(map(str, text_files.files_in(name))), True
    return [name] if name == text_files.STDIN or os.path.isfile(name) else [], False


def _add_folder(result: Inputs, folder: str, paths: Sequence[str], reading: ReadOptions) -> None:
    before, skipped = len(result.spans), []
    arrows = {os.path.dirname(path) for path in paths if path.endswith(".arrow")}
    for path in paths:
        place, name = os.path.split(path)
        if place in arrows and name in DATASET_FACTS:
            continue
        try:
            kind = format_of(path, reading)
            if kind == TEXT and SUFFIXES.get(text_files.suffix_of(path)) != TEXT:
                raise DataError(f"{path}: holds no records, and its name does not end in .txt")
        except DataError as error:
            skipped.append(str(error))
        else:
            result.spans.append(FileSpan.of(path, kind))
    if len(result.spans) == before:
        first = f"; of {len(skipped):,} files the first: {skipped[0]}" if skipped else ""
        raise DataError(f"{folder}: holds no text files{first}")
    result.skipped += skipped


def format_of(path: str, reading: ReadOptions) -> str:
    """The format of a file. Raises DataError where it cannot be read as asked."""
    head = _head(path)
    suffix = SUFFIXES.get(text_files.suffix_of(path))
    content = head.removeprefix(codecs.BOM_UTF8).lstrip()
    kind = _kind(content, suffix)
    if kind in (PARQUET, ARROW) or kind == suffix == JSONL:
        return kind
    if kind == TAR:
        _require_member(path, head, reading)
        return kind
    if kind in (CSV, TSV):
        _require_column(path, head.removeprefix(codecs.BOM_UTF8), kind, reading)
        return kind
    if kind in (JSON, JSONL):
        _require_field(path, content, len(head) < HEAD_BYTES, reading)
        return kind
    _refuse_other_than_text(path, head, content)
    if reading.field is not None and content:
        why = f"is plain text without {reading.field!r}; remove --field, or leave it out"
        raise DataError(f"{path}: {why}")
    return kind


def _kind(content: bytes, suffix: str | None) -> str:
    """The format by content where that is plain, and otherwise by suffix."""
    if suffix in (PARQUET, ARROW, CSV, TSV, JSONL, TAR):
        return suffix
    if content[TAR_MAGIC] == b"ustar":
        return TAR
    if content.startswith(b"PAR1"):
        return PARQUET
    if content.startswith(ARROW_MAGIC):
        return ARROW
    if _ARRAY.match(content) and (suffix == JSON or content[1:].lstrip()[:1] == b"{"):
        return JSON
    if _OBJECT.match(content):
        *lines, _ = content.split(b"\n")  # the last one may be cut off
        return JSONL if not lines or any(map(_is_object, lines)) else JSON
    if suffix == JSON and content:
        return JSON
    return WIKI if _WIKI_DOCUMENT.match(content) else TEXT


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _require_column(path: str, head: bytes, kind: str, reading: ReadOptions) -> None:
    names = next(read_cells(io.StringIO(head.decode(errors="replace")), kind, path), [])
    if names and names.count(reading.text_field) != 1:
        why = "has several columns" if reading.text_field in names else "has no column"
        advice = separator_advice(names) or f"name one with --field: {', '.join(names)}"
        raise DataError(f"{path}: {why} {reading.text_field!r}; {advice}")


def read_cells(lines: Iterable[str], kind: str, path: str) -> Iterator[list[str]]:
    """The cells of each row of a table, blank lines left out; tabs separate without quoting.

    Raises DataError for quotes that are not valid CSV.
    """
    if kind == TSV:
        filled = filter(None, (line.rstrip("\r\n") for line in lines))
        yield from (line.split("\t") for line in filled)
        return
    rows = csv.reader(lines, strict=True)
    try:
        yield from filter(None, rows)
    except csv.Error as error:
        why = f"not valid CSV: {error}; check its quotes"
        raise DataError(f"{path}:{rows.line_num}: {why}") from None


def separator_advice(names: Sequence[str]) -> str:
    """The advice for a header that seems to be separated by another character; empty: it is not."""
    if len(names) == 1 and (other := next(filter(names[0].count, ";\t|,"), "")):
        return f"{other!r} does not separate columns here: commas do in .csv, and tabs in .tsv"
    return ""


def _require_member(path: str, head: bytes, reading: ReadOptions) -> None:
    """Refuse a tar file whose first sample, where all of it is in `head`, has no text."""
    samples: dict[str, list[str]] = {}
    is_all = False
    with suppress(tarfile.TarError, OSError, EOFError, zlib.error):
        with tarfile.open(fileobj=io.BytesIO(head), mode="r|*") as archive:
            for member in filter(tarfile.TarInfo.isreg, archive):
                folder, name = os.path.split(member.name)
                key, _, suffix = name.partition(".")
                samples.setdefault(f"{folder}/{key}", []).append(suffix.lower())
        is_all = True
    first = next(iter(samples.values()), [])
    wanted = {JSON, *(TEXT_MEMBERS if reading.field is None else [reading.field])}
    if first and (is_all or len(samples) > 1) and not wanted & {*first}:
        *others, last = sorted(wanted)
        names = f"{', '.join(others)} or {last}" if others else last
        why = f"its samples have no member {names}; name one with --field"
        raise DataError(f"{path}: {why}: {', '.join(first)}")


def _require_field(path: str, content: bytes, is_all: bool, reading: ReadOptions) -> None:
    """Refuse a small JSON file without the field: it holds settings, say, and no documents."""
    is_list_of_texts = content[:1] == b"[" and content[1:].lstrip()[:1] == b'"'
    names = {reading.text_field, reading.text_field.rpartition(".")[2]}
    has_field = any(json.dumps(name).encode() in content for name in names)
    if is_all and not has_field and not (is_list_of_texts and reading.field is None):
        raise DataError(
            f"{path}: has no field {reading.text_field!r}; name the field of the text with --field"
        )


def _refuse_other_than_text(path: str, head: bytes, content: bytes) -> None:
    if suffix := text_files.packing_of(head):
        raise DataError(f"{path}: is compressed; its name must end in {suffix}")
    for start, encoding in _WIDE.items():
        if head.startswith(start):
            raise DataError(f"{path}: is {encoding}, not UTF-8; convert it, as with iconv")
    if head.startswith(b"%PDF-") or head.count(b"\0") > _MANY_NULS * len(head):
        raise DataError(f"{path}: is not text; convert it to text first")
    if _MARKUP.match(content):
        raise DataError(f"{path}: is HTML or XML; extract its text first")


def _head(path: str) -> bytes:
    """The first bytes of a file's contents; those of standard input can still be read after."""
    if path == text_files.STDIN:
        file = text_files.open_text(path)
        return file.peek(HEAD_BYTES) if isinstance(file, io.BufferedReader) else b""
    with text_files.open_text(path) as file, text_files.decompressing(path):
        return file.read(HEAD_BYTES)
