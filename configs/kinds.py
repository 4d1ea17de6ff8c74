"""Sections that come in kinds: the key `kind` names the dataclass that the other keys are for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

KIND = "kind"
_Schema = TypeVar("_Schema", bound=type)

_KINDS: dict[Any, dict[str, Any]] = {}


def add_kind(base: Any, schema: _Schema) -> _Schema:
    """Let a section of the dataclass `base` be a `schema`, whose `kind` has its name by default.

    Returns `schema`. Raises TypeError where it lacks a method that `base` requires.
    """
    if missing := ", ".join(sorted(getattr(schema, "__abstractmethods__", ()))):
        raise TypeError(f"{schema.__name__} has to define {missing}")
    name = default_kind(schema)
    kinds = _KINDS.setdefault(base, {})
    assert name not in kinds, f"two kinds of {base.__name__} are called {name}"
    kinds[name] = schema
    return schema


def kinds_of(base: Any) -> Mapping[str, Any]:
    """The dataclasses that a section may be, by kind; none where it does not come in kinds."""
    return _KINDS.get(base, {})


def default_kind(schema: Any) -> str:
    """The kind of a section that does not name one."""
    (kind,) = (field.default for field in dataclasses.fields(schema) if field.name == KIND)
    return str(kind)


def chosen(schema: Any, tree: Mapping[str, Any]) -> Any:
    """The dataclass that a section's `kind` names; `schema` itself where there is no such kind."""
    kinds = kinds_of(schema)
    name = tree.get(KIND, default_kind(schema)) if kinds else None
    return kinds.get(name, schema) if isinstance(name, str) else schema


def must_be_named(schema: Any) -> bool:
    """Whether a section is of this dataclass only where its `kind` says so."""
    return any(
        schema in kinds.values() and default_kind(base) != default_kind(schema)
        for base, kinds in _KINDS.items()
    )
