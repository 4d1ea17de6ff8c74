"""JSON schemas (draft 2020-12) of configs, with which editors complete and check a YAML file.

They take what the reader of `configs.typed` takes, and refuse what the fields' own rules refuse.
What keys forbid each other (`Section.conflicts`) is left to the reader.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Mapping
from typing import Any

from configs.declared import Declared, declared, purpose
from configs.rules import Rule
from configs.section import rules_in, split
from configs.typed import options_of

Schema = dict[str, Any]
# A number, true and false will do for a text.
_SCALARS: dict[Any, Schema] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    str: {"type": ["string", "number", "boolean"]},
    Any: {},
}
_NULL: Schema = {"type": "null"}
_PATH: Schema = {"type": "string", "pattern": "[./]", "description": "A YAML file."}


def json_schema(kind: str, root: Any, names: Mapping[str, Collection[str]]) -> Schema:
    """The schema of a kind of file, whose dataclass is `root`.

    `names` are those of the shipped files by kind: what a section or a ``base`` may be named.
    """
    definitions = _Definitions(names)
    whole = definitions.section(root, kind)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{kind} config",
        **whole,
        "$defs": definitions.made,
    }


class _Definitions:
    """The sections of a schema by the names of their dataclasses."""

    def __init__(self, names: Mapping[str, Collection[str]]) -> None:
        self._names = names
        self._keys: dict[tuple[Any, str], str] = {}
        self.made: dict[str, Schema] = {}

    def section(self, schema: Any, kind: str) -> Schema:
        """A mapping with the keys of a dataclass; those without a default unless it has a base."""
        keys = declared(schema)
        properties = {key.name: self._property(key) for key in keys}
        required = [key.name for key in keys if key.is_required]
        made = {
            "type": "object",
            "description": purpose(schema),
            "properties": {"base": self._file(kind)} | properties,
            "additionalProperties": False,
        }
        if required:
            made |= {"if": {"not": {"required": ["base"]}}, "then": {"required": required}}
        return made

    def _property(self, key: Declared) -> Schema:
        made = self._value(key.hint, (), key.name)
        unit = f" In {key.unit}." if key.unit else ""
        if key.doc or unit:
            made = {"description": f"{key.doc}{unit}".strip(), **made}
        if isinstance(key.default, bool | int | float | str):
            made["default"] = key.default
        return made

    def _value(self, hint: Any, each: tuple[Rule, ...], kind: str) -> Schema:
        """What a value of this type may be; `each` are rules for the numbers and texts in it."""
        inner, notes = split(hint)
        each = (*each, *rules_in(notes, whole=False))
        options = options_of(inner)
        if len(options) > 1:
            return {"anyOf": [self._value(one, each, kind) for one in options]}
        if inner is type(None):
            return dict(_NULL)
        if dataclasses.is_dataclass(inner):
            return {"anyOf": [self._reference(inner, kind), self._file(kind), _NULL]}
        whole = rules_in(notes, whole=True)
        if typing.get_origin(inner) in (list, dict):
            return {"anyOf": [self._container(inner, each, kind) | _keywords(whole), _NULL]}
        return _SCALARS[inner] | _keywords(each)

    def _container(self, hint: Any, each: tuple[Rule, ...], kind: str) -> Schema:
        *of_keys, inner = typing.get_args(hint)
        values = self._value(inner, each, kind)
        if not of_keys:
            return {"type": "array", "items": values}
        return {"type": "object", "additionalProperties": values, **_names_of(of_keys[0])}

    def _reference(self, schema: Any, kind: str) -> Schema:
        key = (schema, kind if kind in self._names else "")
        if key not in self._keys:
            same = sum(schema.__name__ == one.__name__ for one, _ in self._keys)
            self._keys[key] = name = schema.__name__ + (str(same + 1) if same else "")
            self.made[name] = {}  # keeps its place before what is in it
            self.made[name] = self.section(schema, kind)
        return {"$ref": f"#/$defs/{self._keys[key]}"}

    def _file(self, kind: str) -> Schema:
        """The name of a shipped file of a kind, or the path of any."""
        names = sorted(self._names.get(kind, ()))
        return {"anyOf": [{"enum": names}, _PATH]} if names else dict(_PATH)


def _keywords(rules: Collection[Rule]) -> Schema:
    return {word: value for rule in rules for word, value in rule.json_schema().items()}


def _names_of(hint: Any) -> Schema:
    """What the keys of a mapping may be; in JSON they are texts."""
    kind, notes = split(hint)
    if kind is int:
        return {"propertyNames": {"pattern": "^-?[0-9]+$"}}
    rules = _keywords(rules_in(notes, whole=False))
    return {"propertyNames": rules} if rules else {}
