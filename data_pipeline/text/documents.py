"""Reading documents: text, JSON lines and Parquet, plain or compressed.

Reading takes two steps, so that processes can share the work. The parent cuts the input into
`RawChunk`s at document boundaries, without decoding it (`raw_chunks`). Workers parse the chunks
into documents (`parse`). Every chunk holds whole documents, so the documents and their order do
not depend on where the input is cut.
"""

from __future__ import annotations

import bisect
import codecs
import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, BinaryIO

from data_pipeline.errors import DataError
from data_pipeline.text.surrogates import without_surrogates
from data_pipeline.text.text_files import (
    STDIN,
    decompressing,
    files_in,
    is_plain,
    open_text,
    suffix_of,
)

if TYPE_CHECKING:
    import pyarrow

TEXT, JSONL, PARQUET = "text", "jsonl", "parquet"
KINDS = {".txt": TEXT, ".text": TEXT, ".jsonl": JSONL, ".ndjson": JSONL, ".parquet": PARQUET}
CHUNK_BYTES = 1 << 20
PROBLEMS_SHOWN = 20  # a summary names the first ones
LONGEST_BOUNDARY = 1 << 16  # bytes searched again when more of the file has been read
BLANK_LINES = rb"\n(?:[ \t\r]*\n)+"


@dataclass(frozen=True)
class ReadOptions:
    """How files are split into documents.

    `separator` is the line between two documents of a text file; None means blank lines. `field`
    is the key (JSON lines) or column (Parquet) that holds the text.
    """

    separator: str | None = None
    field: str = "text"

    def __post_init__(self) -> None:
        if self.separator is not None and (not self.separator or "\n" in self.separator):
            raise DataError("--separator: must be one line, and not empty")

    def boundary(self, kind: str) -> re.Pattern[bytes]:
        """The pattern between two documents of a text or JSON-lines file."""
        if kind == JSONL:
            return re.compile(rb"\n")
        if self.separator is None:
            return re.compile(BLANK_LINES)
        line = re.escape(self.separator.encode()) + rb"[ \t\r]*(?:\n|\Z)"
        return re.compile(rb"(?m)^(?:" + codecs.BOM_UTF8 + rb")?" + line)


@dataclass(frozen=True)
class FileSpan:
    """A whole file, or the bytes of an uncompressed file between two document starts."""

    path: str
    kind: str
    start: int = 0
    end: int | None = None


@dataclass(frozen=True)
class RawChunk:
    """Consecutive whole documents of one file."""

    span: FileSpan
    offset: int  # of `data` in the uncompressed file
    data: bytes | list[Any]  # lists come from Parquet
    consumed: int  # bytes of this span that have been read so far


@dataclass(frozen=True)
class Problem:
    """Input that is not a usable document. `position` is its byte offset or its Parquet row."""

    path: str
    position: int
    reason: str


@dataclass
class Parsed:
    """The documents of a chunk, their positions (as in `Problem`), and what could not be used."""

    documents: list[str] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def find_files(inputs: Sequence[str]) -> list[str]:
    """The files that `inputs` name, in order; matches of a folder or glob are sorted by name.

    `inputs` are files, folders, globs, or ``-`` for standard input. Of a folder, files with a
    suffix of text are read (`files_in`). Raises DataError when one of them matches nothing, or when
    standard input is named twice.
    """
    if [*inputs].count(STDIN) > 1:
        raise DataError(f"{STDIN}: standard input can be read only once; name it once")
    found: list[str] = []
    for name in inputs:
        if not name:
            raise DataError("input: the name is empty; name a file, folder or glob with text")
        if name == STDIN or os.path.isfile(name):
            found.append(name)
            continue
        if os.path.isdir(name):
            matches = [path for path in map(str, files_in(name)) if suffix_of(path) in KINDS]
        else:
            matches = [path for path in glob.glob(name, recursive=True) if os.path.isfile(path)]
        if not matches:
            what = "holds no text files" if os.path.isdir(name) else "no such file or folder"
            raise DataError(f"{name}: {what}")
        found += sorted(matches)  # as strings: another order makes another corpus
    return found


def input_slice(
    inputs: Sequence[str], reading: ReadOptions, task: int, tasks: int
) -> list[FileSpan]:
    """The contiguous slice of the input, by size, that task `task` (from 0) of `tasks` builds.

    Uncompressed text and JSON lines are cut at the next document start. Any other file belongs to
    a single task.
    """
    whole = [FileSpan(path, _kind(path)) for path in find_files(inputs)]
    if tasks == 1:
        return whole
    if any(span.path == STDIN for span in whole):
        raise DataError("--task: standard input cannot be split among tasks; use files instead")
    sizes = [os.path.getsize(span.path) for span in whole]
    ends = list(accumulate(sizes))
    first, last = (_cut(whole, ends, reading, at, tasks) for at in (task, task + 1))
    share = []
    for number, span in enumerate(whole):
        start = first[1] if number == first[0] else 0
        end = last[1] if number == last[0] else None
        if first[0] <= number <= last[0] and end != start:
            share.append(FileSpan(span.path, span.kind, start, end))
    return share


def raw_chunks(share: Sequence[FileSpan], reading: ReadOptions) -> Iterator[RawChunk]:
    """Read the given spans in chunks of about `CHUNK_BYTES`."""
    for span in share:
        if span.kind == PARQUET:
            yield from _parquet_chunks(span, reading)
        else:
            yield from _byte_chunks(span, reading)


def parse(chunk: RawChunk, reading: ReadOptions) -> Parsed:
    """Split a chunk into documents and problems."""
    parsed = Parsed()
    if isinstance(chunk.data, list):
        for row, text in enumerate(chunk.data):
            _add(parsed, chunk, chunk.offset + row, text)
        return parsed
    at = 0
    for match in [*reading.boundary(chunk.span.kind).finditer(chunk.data), None]:
        part = chunk.data[at : match.start()] if match else chunk.data[at:]
        if match or part.strip():
            _parse_part(parsed, chunk, at, part, reading)
        at = match.end() if match else at
    return parsed


def location_of(problem: Problem) -> str:
    """Where a problem is, for a message: ``file:line``, or ``file: row N`` for Parquet."""
    if _kind(problem.path) == PARQUET:
        return f"{problem.path}: row {problem.position + 1}"
    if problem.path == STDIN:
        return f"standard input: byte {problem.position}"
    with open_text(problem.path) as file:
        lines, left = 1, problem.position
        while left > 0 and (data := file.read(min(left, CHUNK_BYTES))):
            lines += data.count(b"\n")
            left -= len(data)
    return f"{problem.path}:{lines}"


def no_documents_error(inputs: Sequence[str], problems: int, first: str | None) -> DataError:
    """The error for `inputs` without a usable document; `first` describes the first problem."""
    names = ", ".join(inputs)
    if first is None:
        return DataError(f"{names}: holds no text")
    return DataError(
        f"{names}: holds no usable document; problems: {problems:,}, the first: {first}"
    )


def read_documents(
    inputs: Sequence[str],
    reading: ReadOptions | None = None,
    on_problem: Callable[[Problem], None] = lambda problem: None,
) -> Iterator[str]:
    """All documents of the given inputs, in order; problems are skipped and passed on."""
    how = reading or ReadOptions()
    for chunk in raw_chunks(input_slice(inputs, how, 0, 1), how):
        parsed = parse(chunk, how)
        for problem in parsed.problems:
            on_problem(problem)
        yield from parsed.documents


def _parse_part(
    parsed: Parsed, chunk: RawChunk, at: int, part: bytes, reading: ReadOptions
) -> None:
    position = chunk.offset + at
    try:
        text = part.decode("utf-8-sig" if position == 0 else "utf-8")
    except UnicodeDecodeError as error:
        bad = position + error.start
        parsed.problems.append(Problem(chunk.span.path, bad, "not valid UTF-8"))
        return
    may_be_blank = position == 0 or chunk.span.kind == JSONL or reading.separator is None
    if not text.strip() and may_be_blank:
        return  # blank lines, or nothing before the first separator: not a document
    if chunk.span.kind == JSONL:
        try:
            text = json.loads(text)[reading.field]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            missing = isinstance(error, (KeyError, TypeError))
            reason = f"no field {reading.field!r}" if missing else "not valid JSON"
            parsed.problems.append(Problem(chunk.span.path, position, reason))
            return
        if isinstance(text, str):
            text = without_surrogates(text)
    _add(parsed, chunk, position, text)


def _add(parsed: Parsed, chunk: RawChunk, position: int, text: object) -> None:
    if not isinstance(text, str):
        parsed.problems.append(Problem(chunk.span.path, position, _no_string(text)))
    elif not (stripped := text.replace("\r\n", "\n").strip()):
        parsed.problems.append(Problem(chunk.span.path, position, "empty document"))
    else:
        parsed.documents.append(stripped)
        parsed.positions.append(position)


def _no_string(value: object) -> str:
    """Why a value that is not a string is no document."""
    try:
        if isinstance(value, bytes):
            value.decode()
    except UnicodeDecodeError:
        return "not valid UTF-8"
    return "the text is not a string"


def _kind(path: str) -> str:
    """The format of a file; that of an unknown suffix is text."""
    return KINDS.get(suffix_of(path), TEXT)


def _byte_chunks(span: FileSpan, reading: ReadOptions) -> Iterator[RawChunk]:
    boundary = reading.boundary(span.kind)
    offset = span.start
    pending, searched = bytearray(), 0  # read, but without a boundary in the first `searched` bytes
    with open_text(span.path) as file:
        if span.start:
            file.seek(span.start)
        while data := _read(file, span, offset + len(pending)):
            pending += data
            cut = _last_boundary(boundary, pending, max(0, searched - LONGEST_BOUNDARY))
            searched = len(pending) - cut
            if cut:
                consumed = offset + len(pending) - span.start
                yield RawChunk(span, offset, bytes(pending[:cut]), consumed)
                offset += cut
                del pending[:cut]
    if pending:
        yield RawChunk(span, offset, bytes(pending), offset + len(pending) - span.start)


def _read(file: BinaryIO, span: FileSpan, position: int) -> bytes:
    size = CHUNK_BYTES if span.end is None else min(CHUNK_BYTES, span.end - position)
    with decompressing(span.path):
        return file.read(size)


def _last_boundary(boundary: re.Pattern[bytes], data: bytearray, first: int) -> int:
    """The end of the last boundary that is certainly complete; 0 if there is none.

    The caller knows that no boundary ends before `first`.
    """
    cut = 0
    for start in (max(first, len(data) - LONGEST_BOUNDARY), first):
        for match in boundary.finditer(data, start):
            if match.end() < len(data):
                cut = match.end()
        if cut:
            break
    return cut


def _parquet_chunks(span: FileSpan, reading: ReadOptions) -> Iterator[RawChunk]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{span.path}: reading Parquet needs `pip install pyarrow`") from None
    try:
        file = pyarrow.parquet.ParquetFile(span.path)
        if reading.field not in file.schema_arrow.names:
            raise DataError(f"{span.path}: has no column {reading.field!r}; name it with --field")
        row, size = 0, os.path.getsize(span.path)
        for batch in file.iter_batches(batch_size=512, columns=[reading.field]):
            texts = _column(batch)
            done = size * (row + len(texts)) // max(1, file.metadata.num_rows)
            yield RawChunk(span, row, texts, done)
            row += len(texts)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{span.path}: not a readable Parquet file: {error}") from None


def _column(batch: pyarrow.RecordBatch) -> list[Any]:
    """The values of a batch of one column; bytes where a text is not valid UTF-8."""
    import pyarrow

    try:
        return batch.column(0).to_pylist()
    except UnicodeDecodeError:
        values = batch.column(0).cast(pyarrow.large_binary()).to_pylist()
        return [None if value is None else _text_or_bytes(value) for value in values]


def _text_or_bytes(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _cut(
    whole: Sequence[FileSpan], ends: list[int], reading: ReadOptions, task: int, tasks: int
) -> tuple[int, int]:
    """Where the slice of a task begins: (file number, byte offset)."""
    total = ends[-1]
    target = total * task // tasks
    if task == 0:
        return 0, 0
    if target == total:  # the end of the last task, or empty input
        return len(whole), 0
    number = bisect.bisect_right(ends, target)
    span = whole[number]
    start = ends[number] - os.path.getsize(span.path)
    if target == start:
        return number, 0
    if span.kind == PARQUET or not is_plain(span.path):
        return number + 1, 0
    at = _document_start(span, reading, target - start)
    return (number + 1, 0) if at is None else (number, at)


def _document_start(span: FileSpan, reading: ReadOptions, position: int) -> int | None:
    """The first document start after `position`.

    Two neighbouring tasks compute the same start, so each document belongs to exactly one.
    """
    pattern = reading.boundary(span.kind)
    if span.kind == TEXT and reading.separator is None:
        # `position` may lie inside a run of blank lines, so only the next run is certainly whole.
        pattern = re.compile(rb"[^ \t\r\n][ \t\r]*" + BLANK_LINES)
    elif span.kind == TEXT:
        separator = re.escape((reading.separator or "").encode())
        pattern = re.compile(rb"\n" + separator + rb"[ \t\r]*\n")
    with open(span.path, "rb") as file:
        file.seek(position)
        data, searched = bytearray(), 0
        while more := file.read(CHUNK_BYTES):
            data += more
            match = pattern.search(data, max(0, searched - LONGEST_BOUNDARY))
            if match and match.end() < len(data):
                return position + match.end()
            searched = match.start() if match else len(data)
    return None
