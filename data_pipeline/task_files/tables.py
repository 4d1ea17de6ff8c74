"""Rows of tables: tab-separated (GLUE's layouts), CSV, JSON lines and Parquet."""

import csv
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from configs.progress import counted
from configs.typed import nearest_of_all
from data_pipeline.errors import BadNumber, DataError
from data_pipeline.task_files.contents import (
    UTF_8,
    not_empty,
    parse_json,
    place,
    read_lines,
    read_text,
    source_name,
)
from data_pipeline.text.formats import separator_advice
from data_pipeline.text.text_files import decompressing, is_plain, open_text, suffix_of

Columns: TypeAlias = Mapping[str, "str | int"]  # by field: a column's name, or its number from 1
OnMalformed: TypeAlias = Callable[[DataError], None]  # told of a row that is left out
Record: TypeAlias = dict[str, Any]

EXACT = 1 << 53  # whole numbers below it are exact in float64
LARGEST = float(np.finfo(np.float32).max)  # as which numbers are stored
TSV, CSV, JSONL, PARQUET = "tsv", "csv", "jsonl", "parquet"
LIST = "a list"
_NOTE = b"huggingface"  # under which `datasets` describes the columns of a Parquet file
SEPARATED = "its columns are separated by tabs"
QUOTED = "a field that holds a comma must be quoted"
LAYOUTS = {
    ".tsv": TSV,
    ".txt": TSV,
    ".csv": CSV,
    ".jsonl": JSONL,
    ".ndjson": JSONL,
    ".json": JSONL,
    ".parquet": PARQUET,
}
# Of a file that may be a table or plain text, these suffixes say that it is a table.
TABLES = tuple(suffix for suffix in LAYOUTS if suffix != ".txt")


class Row(NamedTuple):
    """A row of a table: where it stands, and its values by field; none of a blank row."""

    where: str
    values: dict[str, str]

    @property
    def is_blank(self) -> bool:
        """Whether the row holds nothing but white space."""
        return not self.values


def read_table(
    path: str,
    columns: Columns,
    layout: str | None = None,
    on_malformed: OnMalformed | None = None,
    lists: Collection[str] = (),
    encoding: str = UTF_8,
    numbers: Collection[str] = (),
    optional: Collection[str] = (),
) -> Iterator[Row]:
    """The rows of a table, each as (``file:line``, values by field), without outer white space.

    A row without anything but white space, or null in each field, comes without values; in others
    null is an empty text.

    `columns` says in which column each field stands; in JSON and Parquet, ``doc.text`` is one in a
    nested object. The fields in `lists` may hold lists, which come as JSON. Those in `numbers` are
    for `as_number`: JSON may hold anything in them, or lack them. A record of JSON may lack the
    columns that are `optional`. Numbers of columns are for tab-separated and CSV files without a
    header. Tab-separated files have no quoting. `layout` is told from the suffix unless given.
    Raises DataError for a table without rows and for whatever cannot be read as asked. With
    `on_malformed`, rows of another number of columns than the header's are left out.
    """
    layout = layout or LAYOUTS.get(suffix_of(path))
    if layout is None:
        of_datasets = "; `to_parquet` of `datasets` writes one"
        hint = of_datasets if path.endswith(".arrow") or os.path.isdir(path) else ""
        raise DataError(f"{path}: the name of a table must end in {', '.join(LAYOUTS)}{hint}")
    numbered = {isinstance(column, int) for column in columns.values()}
    if len(numbered) > 1:
        raise DataError(f"{path}: columns: give the names of all of them, or the numbers of all")
    for field, column in columns.items():
        if isinstance(column, int) and column < 1:
            raise DataError(
                f"{path}: {field}: columns are numbered from 1, so {column} is no number of one"
            )
    if layout in (JSONL, PARQUET) and numbered == {True}:
        raise DataError(f"{path}: columns: give their names, which this file has")
    rows: Iterator[Row]
    if layout == TSV:
        rows = _cell_rows(path, columns, _tab_separated(path, encoding), SEPARATED, on_malformed)
    elif layout == CSV:
        rows = _cell_rows(path, columns, _comma_separated(path, encoding), QUOTED, on_malformed)
    elif layout == JSONL:
        rows = _record_rows(columns, _json_records(path, encoding), lists, numbers, optional)
    else:
        rows = _record_rows(columns, _parquet_records(path, columns), lists, numbers)
    empty = True
    for row in rows:
        empty = empty and row.is_blank
        yield row
    if empty:
        raise DataError(f"{path}: holds no rows")


def is_table(path: str) -> bool:
    """Whether a file that may be a table or plain text is a table, by its suffix."""
    return suffix_of(path) in TABLES


def holds_records(path: str) -> bool:
    """Whether a file holds records with named values, by its suffix: JSON or Parquet."""
    return LAYOUTS.get(suffix_of(path)) in (JSONL, PARQUET)


def read_plain_lines(path: str, fields: Sequence[str], encoding: str = UTF_8) -> Iterator[Row]:
    """A row for each line of a file without a header: its fields in order, with tabs between them.

    No line is left out, so that whoever answers each row answers each line. Raises DataError for a
    line with another number of fields, and for a file without lines.
    """
    for number, line in not_empty(read_lines(path, encoding), path, "lines"):
        where = place(path, number)
        cells = [cell.strip() for cell in line.split("\t")]
        if len(cells) != len(fields):
            asked = "one text, without a tab" if len(fields) == 1 else f"{' TAB '.join(fields)}"
            advice = f"of a table, give the columns: --column {fields[0]}=NUMBER"
            raise DataError(f"{where}: a line must be {asked}; {advice}")
        yield Row(where, dict(zip(fields, cells, strict=True)))


def column_names(path: str, encoding: str = UTF_8) -> list[str]:
    """The columns that the first row of a table names, by its suffix. Raises DataError."""
    layout = LAYOUTS.get(suffix_of(path))
    if layout in (TSV, CSV):
        lines = (_tab_separated if layout == TSV else _comma_separated)(path, encoding)
        rows = ([cell.strip() for cell in cells] for _, cells in lines)
        return next(filter(any, rows), [])
    records = (record for _, record in read_records(path, encoding))
    return [*next(filter(None, records), {})]


def header_of(path: str, encoding: str = UTF_8) -> list[str]:
    """The names that the first line of a tab-separated file may hold; none of a line of text."""
    cells = [cell.strip() for cell in next(read_lines(path, encoding), (1, ""))[1].split("\t")]
    return cells if len(cells) > 1 else []


def as_number(where: str, field: str, text: str) -> float:
    """The finite number in a field of the row at `where`. Raises BadNumber."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadNumber(f"{where}: {field}: {text!r} is not a number, as all of its column must be")
    if abs(number) > LARGEST:
        raise BadNumber(f"{where}: {field}: {text} is too large; it must be below {LARGEST:.1e}")
    return number


def list_in(text: str, where: str, field: str) -> list[str]:
    """The texts and numbers of the list in a field, as texts. Raises DataError."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, list):
        raise DataError(f'{where}: {field}: {text!r} is no list, such as ["a", "b"]')
    for value in values:
        _kind(where, field, value)
    return [value.strip() if isinstance(value, str) else _number_text(value) for value in values]


def _cell_rows(
    path: str,
    columns: Columns,
    lines: Iterator[tuple[str, list[str]]],
    advice: str,
    on_malformed: OnMalformed | None,
) -> Iterator[Row]:
    """Lines of cells as rows; the first line is a header where the columns have names.

    `advice` is for a line with too few or too many cells. A blank line is a row without fields.
    """
    header: list[str] | None = None
    places: dict[str, int] = {}
    is_numbered = any(isinstance(column, int) for column in columns.values())
    for where, cells in lines:
        is_blank = not any(cell.strip() for cell in cells)
        if is_blank and (places or is_numbered):
            yield Row(where, {})
        if is_blank:
            continue
        if not places:
            if is_numbered:
                places = {field: int(column) - 1 for field, column in columns.items()}
            else:
                header = [cell.strip() for cell in cells]
                places = {f: _position(path, f, str(c), header) for f, c in columns.items()}
                continue
        why = _wrong_width(cells, header, places)
        if not why:
            yield Row(where, {field: cells[at].strip() for field, at in places.items()})
            continue
        error = DataError(f"{where}: {why}; {advice}")
        if on_malformed is None:
            raise error
        on_malformed(error)


def _wrong_width(cells: list[str], header: list[str] | None, places: Mapping[str, int]) -> str:
    """The fault of a row that lacks a column or has more than the header; empty without one."""
    needed = len(header) if header else max(places.values()) + 1
    if len(cells) >= needed and not (header and len(cells) > needed):
        return ""
    asked = "the header names" if header else "columns go up to"
    return f"has {counted(len(cells), 'column')}, where {asked} {needed}"


def _tab_separated(path: str, encoding: str) -> Iterator[tuple[str, list[str]]]:
    for number, line in read_lines(path, encoding):
        yield place(path, number), line.split("\t")


def _comma_separated(path: str, encoding: str) -> Iterator[tuple[str, list[str]]]:
    reader = csv.reader((f"{line}\n" for _, line in read_lines(path, encoding)), strict=True)
    first = 1
    try:
        for cells in reader:
            yield place(path, first), cells
            first = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"{place(path, first)}: not valid CSV: {error}; check its quotes") from None


def read_records(path: str, encoding: str = UTF_8) -> Iterator[tuple[str, Record]]:
    """(where, record) of each record of JSON lines, of a JSON array or of Parquet.

    A blank line, and a record in which all is null, is an empty record.
    """
    is_parquet = LAYOUTS.get(suffix_of(path)) == PARQUET
    return _parquet_records(path, {}) if is_parquet else _json_records(path, encoding)


def _json_records(path: str, encoding: str) -> Iterator[tuple[str, Record]]:
    for where, record in _json_values(path, encoding):
        record = {} if record is None else record
        if not isinstance(record, dict):
            raise DataError(f"{where}: must be a JSON object: {{...}}")
        yield where, {} if _is_blank(record) else record


def _json_values(path: str, encoding: str) -> Iterator[tuple[str, Any]]:
    """The values of a file of lines, None for a blank one, or of the array in a .json file."""
    if suffix_of(path) == ".json":
        text = read_text(path, encoding)
        if text.lstrip().startswith("["):
            for number, value in enumerate(parse_json(text, path, 1), 1):
                yield f"{source_name(path)}: record {number}", value
            return
    for number, line in read_lines(path, encoding):
        yield place(path, number), parse_json(line, path, number) if line.strip() else None


def class_names(path: str) -> dict[str, list[str]]:
    """The columns of a Parquet file, each with the labels that its whole numbers stand for.

    `datasets` notes the labels of a `ClassLabel`, or of a list of them, in the file; a column in a
    nested object is ``doc.label``. Other columns have none. Empty for other files.
    """
    if LAYOUTS.get(suffix_of(path)) != PARQUET:
        return {}
    with _parquet_file(path) as file:
        note = (file.schema_arrow.metadata or {}).get(_NOTE, b"{}")
        columns: dict[str, list[str]] = {name: [] for name in file.schema_arrow.names}
    # Another program may write anything there.
    with suppress(ValueError, TypeError, AttributeError, LookupError):
        columns |= _labels_in(json.loads(note).get("info", {}).get("features", {}), "")
    return columns


def _labels_in(features: Mapping[str, Any], prefix: str) -> dict[str, list[str]]:
    """The labels of each column among `features` that has some, by its name."""
    labels: dict[str, list[str]] = {}
    for name, feature in features.items():
        while isinstance(feature, list) or {"feature", "_type"} <= feature.keys():  # of a list
            feature = feature[0] if isinstance(feature, list) else feature["feature"]
        if feature.get("_type") == "ClassLabel":
            labels[prefix + name] = [*map(str, feature["names"])]
        elif "_type" not in feature:
            labels |= _labels_in(feature, f"{prefix}{name}.")
    return labels


@contextmanager
def _parquet_file(path: str) -> Iterator[Any]:
    """An open Parquet file. Raises DataError where it cannot be read, also inside."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: reading Parquet needs `pip install pyarrow`") from None
    try:
        yield pyarrow.parquet.ParquetFile(_parquet_source(path))
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from None


def _parquet_records(path: str, columns: Columns) -> Iterator[tuple[str, Record]]:
    with _parquet_file(path) as file:
        names = file.schema_arrow.names
        tops = {f: _top_level(str(c), names) for f, c in columns.items()}
        wanted = [names[_position(path, f, top, names)] for f, top in tops.items()] or names
        number = 0
        for batch in file.iter_batches(columns=sorted({*wanted})):
            for record in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", {} if _is_blank(record) else record


def _is_blank(record: Record) -> bool:
    return all(value is None for value in record.values())


def _parquet_source(path: str) -> Any:
    """The path, or the contents of a compressed file or of standard input, for pyarrow."""
    with open_text(path) as file:
        if is_plain(path):
            return path
        import pyarrow

        with decompressing(path):
            return pyarrow.BufferReader(file.read())


def _record_rows(
    columns: Columns,
    records: Iterator[tuple[str, Record]],
    lists: Collection[str] = (),
    numbers: Collection[str] = (),
    optional: Collection[str] = (),
) -> Iterator[Row]:
    """Records as rows. A column is all text or all numbers: a label 1 is not a label "1"."""
    kinds: dict[str, tuple[str, str]] = {}  # by field: what its first value is, and where
    absent = dict.fromkeys(optional)
    for where, record in records:
        row: dict[str, str] = {}
        values = _values(where, columns, absent | record, numbers, kinds) if record else {}
        for field, value in values.items():
            if field in numbers:
                kinds[field] = ("a number", where)
                row[field] = "" if value is None else str(value).strip()
                continue
            if value is None:  # an empty cell
                row[field] = ""
                continue
            kind = _kind(where, field, value, may_be_list=field in lists)
            first, first_place = kinds.setdefault(field, (kind, where))
            if kind != first:
                raise DataError(
                    f"{where}: {field}: is {kind}, but {first} at {first_place}; make them alike"
                )
            row[field] = value.strip() if isinstance(value, str) else _number_text(value)
        yield Row(where, row)


def _values(
    where: str, columns: Columns, record: Record, numbers: Collection[str], known: Collection[str]
) -> dict[str, Any]:
    """The values of a record by field; none where all but `numbers` are null.

    A number is null where the record lacks its column, which is `known` to be in others.
    """
    values: dict[str, Any] = {}
    for field, column in columns.items():
        try:
            values[field] = _value(where, field, str(column), record)
        except DataError:
            if field not in numbers or field not in known:
                raise
            values[field] = None
    others = {field: value for field, value in values.items() if field not in numbers}
    return {} if _is_blank(others) else values


def _top_level(column: str, names: Collection[str]) -> str:
    """The column that holds a field, which may stand in a nested object: doc of doc.text."""
    return column if column in names else column.partition(".")[0]


def _value(where: str, field: str, column: str, record: Mapping[str, Any]) -> Any:
    top = _top_level(column, record)
    _position(where, field, top if top in record else column, list(record))
    value = record[top]
    for key in column.removeprefix(top).split(".")[1:]:
        if not isinstance(value, Mapping) or key not in value:
            raise DataError(f"{where}: columns.{field}: no column {column!r}: {key} is not there")
        value = value[key]
    return value


def _number_text(value: Any) -> str:
    """A value as text; 1.0 is 1, as what has written the file may not tell them apart."""
    is_whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if is_whole and abs(value) < EXACT else value)


def _kind(where: str, field: str, value: Any, may_be_list: bool = False) -> str:
    if may_be_list and isinstance(value, list):
        for part in value:
            _kind(where, field, part)
        return LIST
    if isinstance(value, str):
        return "text"
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"{where}: {field}: is {value}; it must be text or a number")
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, (int, float)):
        return "a number"
    what = "empty" if value is None else f"a {type(value).__name__}"
    raise DataError(f"{where}: {field}: is {what}; it must be text or a number")


def _position(where: str, field: str, column: str, names: list[str]) -> int:
    """Where a column stands among those that there are."""
    if names.count(column) == 1:
        return names.index(column)
    if column in names:
        raise DataError(f"{where}: columns.{field}: there are several columns {column!r}")
    advice = separator_advice(names)
    hint = f"; {advice}" if advice else nearest_of_all(column, names)
    raise DataError(f"{where}: columns.{field}: no column {column!r}{hint}")
