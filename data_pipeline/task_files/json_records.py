"""Values of JSON records, of the type that they must have."""

from __future__ import annotations

from typing import Any, TypeVar

from data_pipeline.errors import DataError

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
