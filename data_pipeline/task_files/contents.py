"""The contents of a task's file, and records of it that nothing is learnt from.

Readers of `task_files` yield a record for every row, so that answer N is about row N. Those that
train drop the blank ones here.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

from configs.progress import counted
from data_pipeline.errors import DataError
from data_pipeline.text.text_files import STDIN, decompressing, open_text, without_surrogates

UTF_8 = "utf-8"
_SURROGATE = re.compile(r"\\ud[89a-f]", re.IGNORECASE)  # an escape of one, also in a pair


def source_name(path: str) -> str:
    """The name of the file in a message."""
    return "standard input" if path == STDIN else path


def place(path: str, line: int) -> str:
    """Where a line is, for a message."""
    return f"{source_name(path)}:{line}"


def read_lines(path: str, encoding: str = UTF_8) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of each line, without its end; lines end at a newline only.

    A byte-order mark is dropped, also where files were put together. Raises DataError, with the
    line, for other encodings.
    """
    with open_text(path) as file:
        number = 0
        while True:
            with decompressing(path):
                line = file.readline()
            if not line:
                return
            number += 1
            text = _decoded(line, path, number, encoding)
            yield number, text.removeprefix("\ufeff").rstrip("\r\n")


Entry = TypeVar("Entry")


def not_empty(entries: Iterable[Entry], path: str, what: str) -> Iterator[Entry]:
    """Yield what is in a file. Raises DataError where that is nothing: it holds no `what`."""
    empty = True
    for entry in entries:
        empty = False
        yield entry
    if empty:
        raise DataError(f"{source_name(path)}: holds no {what}")


def read_text(path: str, encoding: str = UTF_8) -> str:
    """The whole text, its lines joined with newlines. Raises DataError."""
    return "\n".join(line for _, line in read_lines(path, encoding))


def read_json(path: str, encoding: str = UTF_8) -> Any:
    """The value in a JSON file. Raises DataError, with the line where it is not valid."""
    text = read_text(path, encoding)
    if not text.strip():
        raise DataError(f"{source_name(path)}: is empty")
    return parse_json(text, path, 1)


def parse_json(text: str, path: str, line: int) -> Any:
    """The value in `text`, which begins at this line of the file. Raises DataError.

    Lone surrogates in it become ?, as in the documents of a corpus.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        where = place(path, line + error.lineno - 1)
        raise DataError(f"{where}: not valid JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise DataError(f"{place(path, line)}: not usable JSON: nested too deeply") from None
    except DataError as error:
        raise DataError(f"{place(path, line)}: not usable JSON: {error}") from None
    except ValueError:  # Python reads no whole number of more than 4300 digits
        raise DataError(
            f"{place(path, line)}: not usable JSON: a number has too many digits; shorten it"
        ) from None
    if _SURROGATE.search(text) is None:
        return value
    return json.loads(without_surrogates(json.dumps(value, ensure_ascii=False)))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"the key {twice!r} comes twice; remove one of them")
    return record


def _decoded(line: bytes, path: str, number: int, encoding: str) -> str:
    try:
        return without_surrogates(line.decode(encoding))  # some encodings have escapes
    except UnicodeDecodeError:
        raise DataError(
            f"{place(path, number)}: is not {encoding.upper()}; convert it, as with iconv, or name "
            "its encoding by data.encoding, or by --encoding of `tandem predict`"
        ) from None


Value = TypeVar("Value")
TYPE_NAMES = {str: "text", list: "a list", int: "a whole number", dict: "an object"}


def value_in(record: Any, key: str, kind: type[Value], where: str) -> Value:
    """The value of `key`. Raises DataError, which begins with `where`, for another type or none."""
    if not isinstance(record, dict) or key not in record:
        raise DataError(f"{where}: {key}: is missing")
    value = record[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise DataError(f"{where}: {key}: must be {TYPE_NAMES[kind]}")
    return value


def text_in(record: Any, key: str, where: str) -> str:
    """The text of `key`; as `value_in`."""
    return value_in(record, key, str, where)


def texts_in(record: Any, key: str, where: str) -> tuple[str, ...]:
    """The texts in the list of `key`; as `value_in`."""
    values = value_in(record, key, list, where)
    if not all(isinstance(value, str) for value in values):
        raise DataError(f"{where}: {key}: must be a list of texts")
    return tuple(values)


_log = logging.getLogger(__name__)

SHOWN = 3  # reasons in a message


class Placed(Protocol):
    """A record of a file: where it stands, and whether it holds nothing."""

    @property
    def where(self) -> str: ...

    @property
    def is_blank(self) -> bool: ...


Record = TypeVar("Record", bound=Placed)


class Dropped:
    """Counts what is left out of one file."""

    def __init__(self) -> None:
        self._reasons: dict[str, list[object]] = {}

    def add(self, kind: str, reason: object) -> None:
        """Count a record: of which kind, and where it stands or what is wrong with it.

        `kind` is a singular, such as "blank row" or "row with an ignored label".
        """
        self._reasons.setdefault(kind, []).append(reason)

    def malformed(self, error: Exception) -> None:
        """Count a malformed row; for `read_table`."""
        self.add("malformed row", error)

    def present(self, records: Iterable[Record]) -> Iterator[Record]:
        """Yield the records that are not blank, and count the others."""
        for record in records:
            if record.is_blank:
                self.add("blank row", record.where)
            else:
                yield record

    def tell(self, path: object) -> None:
        """Log how many of each kind the file at `path` has, with the first reasons."""
        for kind, reasons in self._reasons.items():
            first = "; ".join(map(str, reasons[:SHOWN]))
            name = source_name(str(path))
            noun, *rest = kind.partition(" with ")
            rows = counted(len(reasons), kind, "".join([f"{noun}s", *rest]))
            _log.warning("%s: leaves out %s; %s", name, rows, first)


def present(records: Iterable[Record]) -> Iterator[Record]:
    """Yield the records that are not blank, where another pass over the file counts the others."""
    return Dropped().present(records)
