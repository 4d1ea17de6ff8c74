"""The texts of files of records: CSV, tab-separated tables, JSON and Parquet."""

from __future__ import annotations

import codecs
import csv
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeAlias

from data_pipeline.errors import DataError
from data_pipeline.text.formats import CSV, JSON, PARQUET, TSV, ReadOptions
from data_pipeline.text.surrogates import without_surrogates
from data_pipeline.text.text_files import decompressing, open_text

if TYPE_CHECKING:
    import pyarrow

ROWS = 512  # of a batch
NO_FIELD = object()  # stands for the text of a record without the field

Rows: TypeAlias = Iterator[tuple[list[Any], int]]  # values of the field; bytes read so far


def read_rows(path: str, kind: str, reading: ReadOptions) -> Rows:
    """The values of the field of text, in batches of `ROWS`; a text is a string.

    What is not valid UTF-8 are bytes, and `NO_FIELD` stands for a field that is not there. Raises
    DataError for a file that is damaged, or that has no such column.
    """
    return _READERS[kind](path, reading)


def field_of(record: Any, reading: ReadOptions) -> Any:
    """The text of a JSON record: the value of the field, perhaps in nested objects."""
    if isinstance(record, str) and reading.field is None:
        return record
    name, value = reading.text_field, record
    keys = [name] if isinstance(record, Mapping) and name in record else name.split(".")
    for key in keys:
        value = value.get(key, NO_FIELD) if isinstance(value, Mapping) else NO_FIELD
    return without_surrogates(value) if isinstance(value, str) else value


def _table_rows(delimiter: str, quoting: Literal[0, 3]) -> Callable[[str, ReadOptions], Rows]:
    def read(path: str, reading: ReadOptions) -> Rows:
        with open_text(path) as file:
            lines = _decoded_lines(file, path)
            rows = csv.reader(lines, delimiter=delimiter, quoting=quoting, strict=True)
            try:
                names = next(rows, [reading.text_field])  # `format_of` has found the column
                at = names.index(reading.text_field)
                values = (_cell(row, at, len(names)) for row in rows if row)
                while batch := [*islice(values, ROWS)]:
                    yield batch, os.path.getsize(path)
            except csv.Error as error:
                why = f"not valid CSV: {error}; check its quotes"
                raise DataError(f"{path}:{rows.line_num}: {why}") from None

    return read


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
        return NO_FIELD
    try:
        row[at].encode()
    except UnicodeEncodeError:
        return row[at].encode(errors="surrogateescape")
    return row[at]


def _json_rows(path: str, reading: ReadOptions) -> Rows:
    values = (field_of(record, reading) for record in _json_values(path))
    while batch := [*islice(values, ROWS)]:
        yield batch, os.path.getsize(path)


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


def _parquet_rows(path: str, reading: ReadOptions) -> Rows:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: reading Parquet needs `pip install pyarrow`") from None
    column, *inner = reading.text_field.split(".")
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if reading.text_field in names:
            column, inner = reading.text_field, []
        if column not in names:
            why = f"has no column {reading.text_field!r}; name one with --field"
            raise DataError(f"{path}: {why}: {', '.join(names)}")
        row, size = 0, os.path.getsize(path)
        for batch in file.iter_batches(batch_size=ROWS, columns=[column]):
            values = _column(batch)
            row += len(values)
            if inner:
                nested = ReadOptions(field=".".join(inner))
                values = [field_of(value, nested) for value in values]
            yield values, size * row // max(1, file.metadata.num_rows)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from None


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


_READERS: Mapping[str, Callable[[str, ReadOptions], Rows]] = {
    CSV: _table_rows(",", csv.QUOTE_MINIMAL),
    TSV: _table_rows("\t", csv.QUOTE_NONE),
    JSON: _json_rows,
    PARQUET: _parquet_rows,
}
