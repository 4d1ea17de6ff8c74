"""JSON schemas (draft 2020-12) of configs, so that editors complete and check YAML files.

They accept the same types as `configs.typed`, and check the rules of single fields. Rules across
fields (`Section.conflicts`) are only checked when a command reads the file.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection, Mapping
from typing import Any

from configs.declared import Declared, declared, purpose
from configs.kinds import KIND, kinds_of, must_be_named
from configs.rules import Rule
from configs.section import rules_in, split
from configs.typed import options_of

Schema = dict[str, Any]
_INTERPOLATION = r"\$\{"  # what a text in place of a number or a boolean has in it
# A number or a boolean is accepted as a string.
_SCALARS: dict[Any, Schema] = {
    int: {"type": ["integer", "string"], "pattern": _INTERPOLATION},
    float: {"type": ["number", "string"], "pattern": _INTERPOLATION},
    bool: {"type": ["boolean", "string"], "pattern": _INTERPOLATION},
    str: {"type": ["string", "number", "boolean"]},
    Any: {},
}
_NULL: Schema = {"type": "null"}
_INTERPOLATED: Schema = {"type": "string", "pattern": r"^\$\{.+\}$"}
_PATH: Schema = {"type": "string", "pattern": "[./]", "description": "A YAML file."}


def json_schema(kind: str, root: Any, names: Mapping[str, Collection[str]]) -> Schema:
    """The schema of a kind of file, whose dataclass is `root`.

    `names` has the names of the shipped files by kind, which a section or a ``base`` may use.
    """
    definitions = _Definitions(names)
    root_schema = definitions.section(root, kind)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{kind} config",
        **root_schema,
        "$defs": definitions.made,
    }


class _Definitions:
    """The sections of a schema by the names of their dataclasses."""

    def __init__(self, names: Mapping[str, Collection[str]]) -> None:
        self._names = names
        self._keys: dict[tuple[Any, str], str] = {}
        self.made: dict[str, Schema] = {}

    def section(self, schema: Any, kind: str) -> Schema:
        """The schema of a dataclass; keys without a default are required unless there is a base.

        Where a dataclass comes in kinds, that of any of them.
        """
        if kinds := kinds_of(schema):
            return {"anyOf": [self._reference(option, kind) for option in kinds.values()]}
        keys = declared(schema)
        properties = {key.name: self._property(key) for key in keys}
        required = [key.name for key in keys if key.is_required]
        if must_be_named(schema):
            required.append(KIND)
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
        """The schema of a type; `each` are the rules for the scalars in it."""
        inner, notes = split(hint)
        each = (*each, *rules_in(notes, of_container=False))
        options = options_of(inner)
        if len(options) > 1:
            return {"anyOf": [self._value(option, each, kind) for option in options]}
        if inner is type(None):
            return dict(_NULL)
        if dataclasses.is_dataclass(inner):
            return {"anyOf": [self._reference(inner, kind), self._file(kind), _NULL]}
        of_container = rules_in(notes, of_container=True)
        if typing.get_origin(inner) in (list, dict):
            container = self._container(inner, each, kind) | _keywords(of_container)
            return {"anyOf": [container, _INTERPOLATED, _NULL]}
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
            same = sum(schema.__name__ == known.__name__ for known, _ in self._keys)
            self._keys[key] = name = schema.__name__ + (str(same + 1) if same else "")
            self.made[name] = {}  # reserves its place before its own sections
            self.made[name] = self.section(schema, kind)
        return {"$ref": f"#/$defs/{self._keys[key]}"}

    def _file(self, kind: str) -> Schema:
        """The name of a shipped file of a kind, or the path of any file."""
        names = sorted(self._names.get(kind, ()))
        return {"anyOf": [{"enum": names}, _PATH]} if names else dict(_PATH)


def _keywords(rules: Collection[Rule]) -> Schema:
    return {word: value for rule in rules for word, value in rule.json_schema().items()}


def _names_of(hint: Any) -> Schema:
    """The schema of a mapping's keys, which are strings in JSON."""
    kind, notes = split(hint)
    if kind is int:
        return {"propertyNames": {"pattern": "^-?[0-9]+$"}}
    rules = _keywords(rules_in(notes, of_container=False))
    return {"propertyNames": rules} if rules else {}
