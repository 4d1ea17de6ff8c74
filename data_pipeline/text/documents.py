"""Reading documents: text, JSON lines and Parquet, plain or compressed.

Reading is in two steps, so that processes can share the work: the parent cuts the input into
`RawChunk`s at document boundaries without looking at the text (`raw_chunks`), and workers turn
those into documents (`parse`). A chunk is a run of whole documents, so however the input is cut,
the documents and their order are the same.
"""

from __future__ import annotations

import bisect
import glob
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from data_pipeline.errors import DataError
from data_pipeline.text.text_files import COMPRESSED, STDIN, is_plain, open_text

TEXT, JSONL, PARQUET = "text", "jsonl", "parquet"
KINDS = {".txt": TEXT, ".text": TEXT, ".jsonl": JSONL, ".ndjson": JSONL, ".parquet": PARQUET}
CHUNK_BYTES = 1 << 20
LONGEST_BOUNDARY = 1 << 16  # bytes that are searched again when more of the file is read
BLANK_LINES = rb"\n(?:[ \t\r]*\n)+"


@dataclass(frozen=True)
class Reading:
    """How files become documents.

    `separator` is a line that stands between documents of a text file (none: blank lines);
    `field` the key or column of the text in JSON lines and Parquet.
    """

    separator: str | None = None
    field: str = "text"

    def __post_init__(self) -> None:
        if self.separator is not None and (not self.separator or "\n" in self.separator):
            raise DataError("--separator: must be one line, and not empty")

    def boundary(self, kind: str) -> re.Pattern[bytes]:
        """What stands between two documents of a text or JSON-lines file."""
        if kind == JSONL:
            return re.compile(rb"\n")
        if self.separator is None:
            return re.compile(BLANK_LINES)
        return re.compile(rb"(?m)^" + re.escape(self.separator.encode()) + rb"[ \t\r]*(?:\n|\Z)")


@dataclass(frozen=True)
class FileSpan:
    """A file, or the part of a plain one between two document starts."""

    path: str
    kind: str
    start: int = 0
    end: int | None = None


@dataclass(frozen=True)
class RawChunk:
    """A run of whole documents of one file."""

    span: FileSpan
    offset: int  # of `data` in the uncompressed file
    data: bytes | list[str]  # lists come from Parquet
    consumed: int  # bytes of the file on disk that have been read so far in this span


@dataclass(frozen=True)
class Problem:
    """Something in the input that is no document. `position` is a byte, or a row of Parquet."""

    path: str
    position: int
    reason: str


@dataclass
class Parsed:
    """The documents of a chunk, and where each begins, as for a `Problem`."""

    documents: list[str] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def find_files(inputs: Sequence[str]) -> list[str]:
    """The files that `inputs` (files, folders, globs, ``-`` for standard input) name, in order.

    What a folder or glob finds is sorted by name. Raises DataError when one names nothing, or
    standard input is named twice.
    """
    if [*inputs].count(STDIN) > 1:
        raise DataError(f"{STDIN}: standard input can be read once only; name it once")
    found: list[str] = []
    for name in inputs:
        if not name:
            raise DataError("an empty name; name a file, a folder or a glob with text")
        if name == STDIN or os.path.isfile(name):
            found.append(name)
            continue
        if os.path.isdir(name):
            matches = [str(path) for path in Path(name).rglob("*") if path.is_file()]
            matches = [path for path in matches if _suffixes(path)[0] in KINDS]
        else:
            matches = [path for path in glob.glob(name, recursive=True) if os.path.isfile(path)]
        if not matches:
            what = "no text files there" if os.path.isdir(name) else "no such file or folder"
            raise DataError(f"{name}: {what}")
        found += sorted(matches)
    return found


def slice_of(inputs: Sequence[str], reading: Reading, task: int, tasks: int) -> list[FileSpan]:
    """The share of the input of task number `task` (from 0) of `tasks`, contiguous and by size.

    Plain text and JSON lines are cut at the next document start, other files belong to one task.
    """
    whole = [FileSpan(path, _suffixes(path)[1]) for path in find_files(inputs)]
    if tasks == 1:
        return whole
    if any(span.path == STDIN for span in whole):
        raise DataError("--task: standard input cannot be shared out among tasks")
    sizes = [os.path.getsize(span.path) for span in whole]
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    first, last = (_cut(whole, ends, reading, at, tasks) for at in (task, task + 1))
    share = []
    for number, span in enumerate(whole):
        start = first[1] if number == first[0] else 0
        end = last[1] if number == last[0] else None
        if first[0] <= number <= last[0] and end != start:
            share.append(FileSpan(span.path, span.kind, start, end))
    return share


def raw_chunks(share: Sequence[FileSpan], reading: Reading) -> Iterator[RawChunk]:
    """The documents of the given spans in chunks of about `CHUNK_BYTES`."""
    for span in share:
        if span.kind == PARQUET:
            yield from _parquet_chunks(span, reading)
        else:
            yield from _byte_chunks(span, reading)


def parse(chunk: RawChunk, reading: Reading) -> Parsed:
    """The documents of a chunk; what is none is a problem."""
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


def line_of(problem: Problem) -> str:
    """Where a problem is, for people: ``file:line``, or ``file: row N``."""
    kind = _suffixes(problem.path)[1]
    if kind == PARQUET:
        return f"{problem.path}: row {problem.position + 1}"
    if problem.path == STDIN:
        return f"standard input: byte {problem.position}"
    with open_text(problem.path) as file:
        lines, left = 1, problem.position
        while left > 0 and (data := file.read(min(left, CHUNK_BYTES))):
            lines += data.count(b"\n")
            left -= len(data)
    return f"{problem.path}:{lines}"


def nothing_there(inputs: Sequence[str], problems: int, first: str | None) -> DataError:
    """That no document of the `inputs` has text; of so many `problems` the `first` says why."""
    names = ", ".join(inputs)
    if first is None:
        return DataError(f"{names}: no text there")
    return DataError(f"{names}: no document can be used; {problems:,} cannot, the first is {first}")


def read_documents(
    inputs: Sequence[str],
    reading: Reading | None = None,
    on_problem: Callable[[Problem], None] = lambda problem: None,
) -> Iterator[str]:
    """All documents of the given inputs, in order; what cannot be read as one is passed over."""
    how = reading or Reading()
    for chunk in raw_chunks(slice_of(inputs, how, 0, 1), how):
        parsed = parse(chunk, how)
        for problem in parsed.problems:
            on_problem(problem)
        yield from parsed.documents


def _parse_part(parsed: Parsed, chunk: RawChunk, at: int, part: bytes, reading: Reading) -> None:
    position = chunk.offset + at
    try:
        text = part.decode("utf-8-sig" if position == 0 else "utf-8")
    except UnicodeDecodeError as error:
        bad = position + error.start
        parsed.problems.append(Problem(chunk.span.path, bad, "not valid UTF-8"))
        return
    if not text.strip() and reading.separator is None:
        return  # blank lines are no documents
    if chunk.span.kind == JSONL:
        try:
            text = json.loads(text)[reading.field]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            missing = isinstance(error, (KeyError, TypeError))
            reason = f"no field {reading.field!r}" if missing else "not valid JSON"
            parsed.problems.append(Problem(chunk.span.path, position, reason))
            return
        if isinstance(text, str):
            # Lone surrogates come out of JSON escapes and cannot be encoded again.
            text = text.encode("utf-8", "replace").decode()
    _add(parsed, chunk, position, text)


def _add(parsed: Parsed, chunk: RawChunk, position: int, text: object) -> None:
    if not isinstance(text, str):
        parsed.problems.append(Problem(chunk.span.path, position, "the text is not a string"))
    elif not (stripped := text.replace("\r\n", "\n").strip()):
        parsed.problems.append(Problem(chunk.span.path, position, "empty document"))
    else:
        parsed.documents.append(stripped)
        parsed.positions.append(position)


def _suffixes(path: str) -> tuple[str, str]:
    """(the suffix that decides the format, the format): ("", "text") for an unknown one."""
    name = Path(path)
    if name.suffix.lower() in COMPRESSED:
        name = name.with_suffix("")
    suffix = name.suffix.lower()
    return suffix, KINDS.get(suffix, TEXT)


def _byte_chunks(span: FileSpan, reading: Reading) -> Iterator[RawChunk]:
    boundary = reading.boundary(span.kind)
    offset = span.start
    pending, searched = bytearray(), 0  # what has no boundary up to `searched`
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
    try:
        return file.read(size)
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{span.path}: cannot be decompressed: {error}") from None
    except Exception as error:  # zstandard has an exception of its own, derived from Exception
        if type(error).__name__ != "ZstdError":
            raise
        raise DataError(f"{span.path}: cannot be decompressed: {error}") from None


def _last_boundary(boundary: re.Pattern[bytes], data: bytearray, first: int) -> int:
    """The end of the last boundary that is certainly whole, 0 if there is none; none is known to
    end before `first`."""
    cut = 0
    for start in (max(first, len(data) - LONGEST_BOUNDARY), first):
        for match in boundary.finditer(data, start):
            if match.end() < len(data):
                cut = match.end()
        if cut:
            break
    return cut


def _parquet_chunks(span: FileSpan, reading: Reading) -> Iterator[RawChunk]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{span.path}: reading Parquet needs `pip install pyarrow`") from None
    try:
        file = pyarrow.parquet.ParquetFile(span.path)
        if reading.field not in file.schema_arrow.names:
            raise DataError(f"{span.path}: has no column {reading.field!r}")
        row, size = 0, os.path.getsize(span.path)
        for batch in file.iter_batches(batch_size=512, columns=[reading.field]):
            texts = batch.column(0).to_pylist()
            done = size * (row + len(texts)) // max(1, file.metadata.num_rows)
            yield RawChunk(span, row, texts, done)
            row += len(texts)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{span.path}: not a readable Parquet file: {error}") from None


def _cut(
    whole: Sequence[FileSpan], ends: list[int], reading: Reading, task: int, tasks: int
) -> tuple[int, int]:
    """Where the share of a task begins: (file number, byte)."""
    total = ends[-1]
    target = total * task // tasks
    if task == 0:
        return 0, 0
    if target == total:  # behind the last task, or there is nothing
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


def _document_start(span: FileSpan, reading: Reading, position: int) -> int | None:
    """The first document start behind `position`, the same for whoever asks."""
    pattern = reading.boundary(span.kind)
    if span.kind == TEXT and reading.separator is None:
        # From the middle of blank lines, only the next ones are sure to be seen whole.
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
