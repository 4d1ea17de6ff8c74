"""The texts of files of records: CSV, tab-separated tables, JSON, Parquet, WebDataset tars."""

from __future__ import annotations

import codecs
import json
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from data_pipeline.errors import DataError
from data_pipeline.text import formats
from data_pipeline.text.formats import FileSpan, ReadOptions
from data_pipeline.text.text_files import decompressing, open_bytes, open_text, without_surrogates

if TYPE_CHECKING:
    import pyarrow

ROWS = 512  # of a batch


class Fault(Enum):
    """Stands for the text of a record that has none, and says why."""

    NO_FIELD = "no field"
    NOT_JSON = "not valid JSON"
    REPEATED = "a second member of its name"


Rows: TypeAlias = Iterator[tuple[list[Any], int]]  # values of the field; bytes read so far


def read_rows(span: FileSpan, reading: ReadOptions) -> Rows:
    """The values of the field of text, in batches of `ROWS`; a text is a string.

    What is not valid UTF-8 are bytes, and a `Fault` stands for a text that is not there. Raises
    DataError for a file that is damaged, or that has no such column.
    """
    return _READERS[span.kind](span, reading)


def field_of(record: Any, reading: ReadOptions) -> Any:
    """The text of a JSON record: the value of the field, perhaps in nested objects."""
    if isinstance(record, str) and reading.field is None:
        return record
    name, value = reading.text_field, record
    keys = [name] if isinstance(record, Mapping) and name in record else name.split(".")
    for key in keys:
        value = value.get(key, Fault.NO_FIELD) if isinstance(value, Mapping) else Fault.NO_FIELD
    return without_surrogates(value) if isinstance(value, str) else value


def _table_rows(span: FileSpan, reading: ReadOptions) -> Rows:
    with open_text(span.path) as file:
        rows = formats.read_cells(_decoded_lines(file, span.path), span.kind, span.path)
        names = next(rows, [reading.text_field])  # `format_of` has found the column
        at = names.index(reading.text_field)
        values = (_cell(row, at, len(names)) for row in rows)
        while batch := [*islice(values, ROWS)]:
            yield batch, span.bytes


def _decoded_lines(file: BinaryIO, path: str) -> Iterator[str]:
    """The lines of a file; what is not UTF-8 in them becomes lone surrogates."""
    start = codecs.BOM_UTF8
    while True:
        with decompressing(path):
            line = file.readline()
        if not line:
            return
        yield line.removeprefix(start).decode(errors="surrogateescape")
        start = b""


def _cell(row: Sequence[str], at: int, width: int) -> Any:
    """The text in a row; bytes where it is not UTF-8. A row of another width may be shifted."""
    if len(row) != width:
        return Fault.NO_FIELD
    try:
        row[at].encode()
    except UnicodeEncodeError:
        return row[at].encode(errors="surrogateescape")
    return row[at]


def _json_rows(span: FileSpan, reading: ReadOptions) -> Rows:
    values = (field_of(record, reading) for record in _json_values(span.path))
    while batch := [*islice(values, ROWS)]:
        yield batch, span.bytes


def _json_values(path: str) -> Iterator[Any]:
    """The members of an array, or values that follow each other; never the whole file at once."""
    decoder, pending, size, is_first = json.JSONDecoder(), "", 1 << 20, True
    with open_text(path) as file:
        characters = codecs.getreader("utf-8-sig")(file)
        while True:
            with decompressing(path):
                more = characters.read(size)
            pending, is_last = pending + more, not more
            at = 0
            while (at := _after_punctuation(pending, at, is_first)) < len(pending):
                is_first = False
                try:
                    value, end = decoder.raw_decode(pending, at)
                except (ValueError, RecursionError) as error:
                    if is_last:
                        raise DataError(f"{path}: not valid JSON: {error}") from None
                    break
                if end == len(pending) and not is_last:
                    break  # a number may go on
                yield value
                at = end
            if is_last:
                return
            pending = pending[at:]
            size = max(1 << 20, len(pending))  # so that a long value is not parsed too often


def _after_punctuation(text: str, at: int, opens: bool) -> int:
    """The place after white space and commas, and after the brackets of the outer array."""
    ignored = " \t\r\n,]" + ("[" if opens else "")
    while at < len(text) and text[at] in ignored:
        at += 1
    return at


def _columnar_rows(span: FileSpan, reading: ReadOptions) -> Rows:
    """The values of a column of a Parquet or Arrow file."""
    name = "Parquet" if span.kind == formats.PARQUET else "Arrow"
    try:
        import pyarrow
    except ImportError:
        raise DataError(f"{span.path}: reading {name} needs `pip install pyarrow`") from None
    rows = _parquet_rows if span.kind == formats.PARQUET else _arrow_rows
    with decompressing(span.path):
        try:
            with open_bytes(span.path, seeks=True) as file:
                yield from rows(file, span, reading)
        except DataError:
            raise
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            reason = f"not a readable {name} file: {' '.join(str(error).split())}"
            raise DataError(f"{span.path}: {reason}") from None


def _parquet_rows(source: BinaryIO, span: FileSpan, reading: ReadOptions) -> Rows:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(source)
    column, inner = _column_of(span.path, file.schema_arrow.names, reading)
    row = 0
    for batch in file.iter_batches(batch_size=ROWS, columns=[column]):
        row += len(batch)
        yield _column(batch.column(0), inner), span.bytes * row // file.metadata.num_rows


def _arrow_rows(source: BinaryIO, span: FileSpan, reading: ReadOptions) -> Rows:
    """The rows of an Arrow stream, as the library `datasets` writes it, or of an Arrow file."""
    import pyarrow

    is_file = source.read(len(formats.ARROW_MAGIC)) == formats.ARROW_MAGIC
    source.seek(0)
    if is_file:
        file = pyarrow.ipc.open_file(source)
        batches = map(file.get_batch, range(file.num_record_batches))
    else:
        file = batches = pyarrow.ipc.open_stream(source)
    column, inner = _column_of(span.path, file.schema.names, reading)
    for batch in batches:
        values = batch.column(file.schema.names.index(column))
        for start in range(0, len(values), ROWS):
            yield _column(values[start : start + ROWS], inner), min(span.bytes, source.tell())


def _column_of(
    path: str, names: Sequence[str], reading: ReadOptions
) -> tuple[str, ReadOptions | None]:
    """The column of the text, and how it is read from a record in it."""
    column, _, inner = reading.text_field.partition(".")
    if reading.text_field in names:
        column, inner = reading.text_field, ""
    if column not in names:
        why = f"has no column {reading.text_field!r}; name one with --field"
        raise DataError(f"{path}: {why}: {', '.join(names)}")
    return column, ReadOptions(field=inner) if inner else None


def _column(values: pyarrow.Array, inner: ReadOptions | None) -> list[Any]:
    """The texts in a column; bytes where one is not valid UTF-8."""
    import pyarrow

    try:
        texts = values.to_pylist()
    except UnicodeDecodeError:
        raw = values.cast(pyarrow.large_binary()).to_pylist()
        texts = [None if text is None else _text_or_bytes(text) for text in raw]
    return [field_of(text, inner) for text in texts] if inner else texts


def _text_or_bytes(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _tar_rows(span: FileSpan, reading: ReadOptions) -> Rows:
    """The text of each sample; `webdataset` groups members by their names before the first dot."""
    from webdataset.tariterators import group_by_keys, tar_file_expander

    repeated: list[Exception] = []

    def note(error: Exception) -> bool:
        repeated.append(error)
        return True

    def texts(file: BinaryIO) -> Iterator[Any]:
        members = tar_file_expander([{"url": span.path, "stream": file}])
        for sample in group_by_keys(members, handler=note):
            yield from [Fault.REPEATED] * len(repeated)
            repeated.clear()
            yield _sample_text(sample, reading)

    with open_text(span.path) as file, decompressing(span.path):
        values = texts(file)
        try:
            while batch := [*islice(values, ROWS)]:
                yield batch, span.bytes
        except (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError) as error:
            reason = error.args[0] if error.args else type(error).__name__
            raise DataError(f"{span.path}: not a readable tar file: {reason}") from None


def _sample_text(sample: Mapping[str, bytes], reading: ReadOptions) -> Any:
    """The text of a member, or the field of its JSON; bytes where it is not valid UTF-8."""
    names = formats.TEXT_MEMBERS if reading.field is None else (reading.field,)
    for name in names:
        if name in sample and name != formats.JSON:
            return _text_or_bytes(sample[name].removeprefix(codecs.BOM_UTF8))
    try:
        return (
            field_of(json.loads(sample[formats.JSON]), reading)
            if formats.JSON in sample
            else Fault.NO_FIELD
        )
    except (ValueError, RecursionError):
        return Fault.NOT_JSON


_READERS: Mapping[str, Callable[[FileSpan, ReadOptions], Rows]] = {
    formats.CSV: _table_rows,
    formats.TSV: _table_rows,
    formats.JSON: _json_rows,
    formats.PARQUET: _columnar_rows,
    formats.ARROW: _columnar_rows,
    formats.TAR: _tar_rows,
}
