"""Reading documents, plain or compressed, in any of the `formats`.

Reading takes two steps, so that processes can share the work. The parent cuts the input into
`RawChunk`s at document boundaries, without decoding it (`raw_chunks`). Workers parse the chunks
into documents (`parse`). Every chunk holds whole documents, so the documents and their order do
not depend on where the input is cut.
"""

import bisect
import codecs
import html
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, BinaryIO

from configs.errors import OptionError
from data_pipeline.errors import DataError
from data_pipeline.remote import is_remote
from data_pipeline.text import formats
from data_pipeline.text.formats import FileSpan, ReadOptions
from data_pipeline.text.records import Fault, field_of, read_rows
from data_pipeline.text.text_files import STDIN, decompressing, is_plain, open_text

CHUNK_BYTES = 1 << 20
PROBLEMS_SHOWN = 20  # a summary names the first ones
LONGEST_BOUNDARY = 1 << 16  # bytes searched again when more of the file has been read
BLANK_LINES = rb"\n(?:[ \t\r]*\n)+"


def boundary_of(kind: str, reading: ReadOptions) -> re.Pattern[bytes]:
    """The pattern between two documents of a file that is read as bytes."""
    if kind == formats.JSONL or (kind == formats.TEXT and reading.separator == formats.LINE):
        return re.compile(rb"\n")
    if kind == formats.WIKI:
        return re.compile(rb"</doc>[ \t\r]*(?:\n|\Z)")
    if reading.separator is None:
        return re.compile(BLANK_LINES)
    line = re.escape(reading.separator.encode()) + rb"[ \t\r]*(?:\n|\Z)"
    return re.compile(rb"(?m)^(?:" + codecs.BOM_UTF8 + rb")?" + line)


@dataclass(frozen=True)
class Problem:
    """Input that is not a usable document. `position` is its byte offset, or its row in records."""

    path: str
    position: int
    reason: str
    is_row: bool = False


@dataclass(frozen=True)
class RawChunk:
    """Consecutive whole documents of one file."""

    span: FileSpan
    offset: int  # of `data` in the uncompressed file
    data: bytes | list[Any]  # lists come from files of records
    consumed: int  # bytes of this span that have been read so far

    def problem(self, position: int, reason: str) -> Problem:
        """A problem with the document at this position."""
        return Problem(self.span.path, position, reason, isinstance(self.data, list))


@dataclass
class Parsed:
    """The documents of a chunk, their positions (as in `Problem`), and what could not be used."""

    documents: list[str] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def slice_of(
    spans: Sequence[FileSpan], reading: ReadOptions, task: int, tasks: int
) -> list[FileSpan]:
    """The contiguous slice of the input, by size, that task `task` (from 0) of `tasks` builds.

    Uncompressed text and JSON lines are cut at the next document start. Any other file belongs to
    a single task.
    """
    if tasks == 1:
        return [*spans]
    if any(span.path == STDIN for span in spans):
        raise OptionError("--task: standard input cannot be split among tasks; use files instead")
    sizes = [0 if span.size is None else span.size for span in spans]
    if any(span.size is None for span in spans):
        sizes = [1] * len(spans)  # as many files for each task
    ends = list(accumulate(sizes))
    first, last = (_cut(spans, sizes, ends, reading, at, tasks) for at in (task, task + 1))
    share = []
    for number, span in enumerate(spans):
        start = first[1] if number == first[0] else 0
        end = last[1] if number == last[0] else None
        if first[0] <= number <= last[0] and end != start:
            share.append(replace(span, start=start, end=end))
    return share


def raw_chunks(share: Sequence[FileSpan], reading: ReadOptions) -> Iterator[RawChunk]:
    """Read the given spans in chunks of about `CHUNK_BYTES`."""
    for span in share:
        if span.kind in formats.RECORDS:
            row = 0
            for texts, consumed in read_rows(span, reading):
                yield RawChunk(span, row, texts, consumed)
                row += len(texts)
        else:
            yield from _byte_chunks(span, reading)


def parse(chunk: RawChunk, reading: ReadOptions) -> Parsed:
    """Split a chunk into documents and problems."""
    parsed = Parsed()
    if isinstance(chunk.data, list):
        for row, text in enumerate(chunk.data):
            _add(parsed, chunk, chunk.offset + row, text, reading)
        return parsed
    at = 0
    for match in [*boundary_of(chunk.span.kind, reading).finditer(chunk.data), None]:
        part = chunk.data[at : match.start()] if match else chunk.data[at:]
        if match or part.strip():
            _parse_part(parsed, chunk, at, part, reading)
        at = match.end() if match else at
    return parsed


def location_of(problem: Problem) -> str:
    """Where a problem is, for a message: ``file:line``, or ``file: row N`` in records."""
    if problem.is_row:
        return f"{problem.path}: row {problem.position + 1}"
    if problem.path == STDIN or is_remote(problem.path):  # which is not read again
        name = "standard input" if problem.path == STDIN else problem.path
        return f"{name}: byte {problem.position}"
    with open_text(problem.path) as file:
        lines, left = 1, problem.position
        while left > 0 and (data := file.read(min(left, CHUNK_BYTES))):
            lines += data.count(b"\n")
            left -= len(data)
    return f"{problem.path}:{lines}"


def require_usable(inputs: Sequence[str], usable: int, problems: int, first: str | None) -> None:
    """Raise DataError unless most documents are `usable`; `first` describes the first problem."""
    names = ", ".join(inputs)
    if not usable and first is None:
        raise DataError(f"{names}: holds no text")
    if problems > usable:
        raise DataError(
            f"{names}: {problems:,} of {problems + usable:,} documents are unusable; the first: "
            f"{first}; name the --field or --separator that fits, or remove them"
        )


def read_documents(
    inputs: Sequence[str],
    reading: ReadOptions | None = None,
    on_problem: Callable[[Problem], None] = lambda problem: None,
) -> Iterator[str]:
    """All documents of the given inputs, in order; problems are skipped and passed on."""
    how = reading or ReadOptions()
    for chunk in raw_chunks(formats.find_inputs(inputs, how).spans, how):
        parsed = parse(chunk, how)
        for problem in parsed.problems:
            on_problem(problem)
        yield from parsed.documents


def _parse_part(
    parsed: Parsed, chunk: RawChunk, at: int, part: bytes, reading: ReadOptions
) -> None:
    position, kind = chunk.offset + at, chunk.span.kind
    try:
        text = part.decode().removeprefix("\ufeff")  # also where files were put together
    except UnicodeDecodeError as error:
        bad = position + error.start
        parsed.problems.append(Problem(chunk.span.path, bad, "not valid UTF-8"))
        return
    may_be_blank = (
        position == 0 or kind != formats.TEXT or reading.separator in (None, formats.LINE)
    )
    if not text.strip() and may_be_blank:
        return  # blank lines, or nothing before the first separator: not a document
    if kind == formats.JSONL:
        try:
            _add(parsed, chunk, position, field_of(json.loads(text), reading), reading)
        except (ValueError, RecursionError):
            parsed.problems.append(Problem(chunk.span.path, position, "not valid JSON"))
    else:
        _add(parsed, chunk, position, _wiki_text(text) if kind == formats.WIKI else text, reading)


def _wiki_text(part: str) -> object:
    """The text of a document of wikiextractor, or a `Fault` for text outside of its tags."""
    head, _, text = part.strip().partition("\n")
    if not head.startswith("<doc"):
        return Fault.NO_FIELD
    if not head.endswith(">"):
        head, _, text = part.strip().partition(">")
    return html.unescape(text.removesuffix("</doc>"))


def _add(
    parsed: Parsed, chunk: RawChunk, position: int, text: object, reading: ReadOptions
) -> None:
    reason = "empty document"
    if isinstance(text, Fault):
        is_outside = text is Fault.NO_FIELD and chunk.span.kind == formats.WIKI
        name = f" {reading.text_field!r}" if text is Fault.NO_FIELD else ""
        reason = "outside of <doc ...> and </doc>" if is_outside else f"{text.value}{name}"
    elif not isinstance(text, str):
        reason = _no_string(text)
    elif stripped := text.replace("\r\n", "\n").strip():
        parsed.documents.append(stripped)
        parsed.positions.append(position)
        return
    parsed.problems.append(chunk.problem(position, reason))


def _no_string(value: object) -> str:
    """Why a value that is not a string is no document."""
    try:
        if isinstance(value, bytes):
            value.decode()
    except UnicodeDecodeError:
        return "not valid UTF-8"
    return "the text is not a string"


def _byte_chunks(span: FileSpan, reading: ReadOptions) -> Iterator[RawChunk]:
    boundary = boundary_of(span.kind, reading)
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


def _cut(
    spans: Sequence[FileSpan],
    sizes: list[int],
    ends: list[int],
    reading: ReadOptions,
    task: int,
    tasks: int,
) -> tuple[int, int]:
    """Where the slice of a task begins: (file number, byte offset)."""
    total = ends[-1]
    target = total * task // tasks
    if task == 0:
        return 0, 0
    if target == total:  # the end of the last task, or empty input
        return len(spans), 0
    number = bisect.bisect_right(ends, target)
    span = spans[number]
    start = ends[number] - sizes[number]
    if target == start:
        return number, 0
    if span.kind in formats.RECORDS or not is_plain(span.path):
        return number + 1, 0
    at = _document_start(span, reading, target - start)
    return (number + 1, 0) if at is None else (number, at)


def _document_start(span: FileSpan, reading: ReadOptions, position: int) -> int | None:
    """The first document start after `position`.

    Two neighbouring tasks compute the same start, so each document belongs to exactly one.
    """
    pattern = boundary_of(span.kind, reading)
    if span.kind == formats.TEXT and reading.separator is None:
        # `position` may lie inside a run of blank lines, so only the next run is certainly whole.
        pattern = re.compile(rb"[^ \t\r\n][ \t\r]*" + BLANK_LINES)
    elif span.kind == formats.TEXT and reading.separator != formats.LINE:
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
