"""Every key of a schema with every kind of wrong value, as pure functions of the schema."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from configs.kinds import chosen
from configs.reference import notes_within
from configs.rules import OneOf, Range, Rule
from configs.section import annotated_hints
from configs.typed import hints_of, options_of

NUMBERS = (int, float)
# What is wrong for every key, as it stands in YAML: its kind, and the text.
NEVER = {
    "an unknown tag": "!!python/object:os.system x",
    "an unset value": "???",
    "an open bracket": "[1, {a",
    "an alias of nothing": "*nobody",
    "a control character": '"\\0"',
    "a lone surrogate": '"\\ud800"',
    "deep nesting": "[" * 3000,
    "a list in a list": "[[[1]]]",
    "a key that is null": "{null: 1}",
    "an unknown section": "{no_such_key: {nor_this: 1}}",
    "more than any number": "1" * 500,
}
NO_NUMBER = {
    "a text": "many", "a quoted number": "'1'", "true": "true", "nothing": "''",
    "not a number": ".nan", "infinity": "-.inf", "an interpolation": "${no.such.key}",
    "a number's expression": "1+1", "a list": "[1]", "a mapping": "{1: 1}",
}  # fmt: skip
NO_WHOLE_NUMBER = {"a fraction": "2.5", "beyond 64 bits": str(2**63), "far below": str(-(10**30))}
BEYOND_MEANING = {"beyond meaning": "9000000000000000000", "far below zero": "-9000000000000000000"}
ANY_NUMBER = ("seed",)  # keys whose every number is as good as another
NO_TRUTH = {"a number": "1", "a text": "perhaps", "a quoted truth": "'true'", "a list": "[true]"}
NO_TEXT = {"a list": "[a]", "a mapping": "{a: b}"}
NO_SECTION = {
    "a text": "no-such-name",
    "a number": "7",
    "a list": "[1]",
    "a path": "/nowhere/x.yaml",
}
NO_LIST = {"a text": "many", "a number": "7", "true": "true"}


@dataclass(frozen=True)
class BadValue:
    """A value that the key must not have."""

    key: str
    kind: str
    value: str

    @property
    def override(self) -> str:
        """The `key=value` for the command line."""
        return f"{self.key}={self.value}"


@dataclass(frozen=True)
class Key:
    """A key of a schema, with its full name, the types of its values, and its rules."""

    name: str
    types: tuple[Any, ...]
    rules: tuple[Rule, ...]
    is_empty_by_default: bool  # a text, which null then clears


def keys(schema: Any, path: str = "", named: str = "one") -> Iterator[Key]:
    """All keys of a schema, a section before its keys; `named` stands for any free name."""
    schema = chosen(schema, {})  # its keys, where it comes in kinds
    for field in dataclasses.fields(schema):
        key = f"{path}.{field.name}" if path else field.name
        options = options_of(hints_of(schema)[field.name])
        notes = notes_within(annotated_hints(schema)[field.name])
        rules = tuple(note for note in notes if isinstance(note, Rule))
        yield Key(key, options, rules, field.default == "")
        for option in options:
            if dataclasses.is_dataclass(option):
                yield from keys(option, key, named)
            elif typing.get_origin(option) is dict:
                inner = typing.get_args(option)[1]
                if dataclasses.is_dataclass(inner):
                    yield from keys(inner, f"{key}.{named}", named)


def bad_values(key: Key) -> Iterator[BadValue]:
    """Every kind of value that a key of these types must refuse."""
    kinds = [dict(NEVER)]
    options = [one for one in key.types if one is not type(None)]
    for option in options:
        beyond = BEYOND_MEANING if option in (int, float) and key.name not in ANY_NUMBER else {}
        kinds.append(_wrong_for(option) | beyond)
    wrong = {kind: value for kind, value in kinds[0].items() if not _is_right(value, options)}
    for kind, value in set.intersection(*(set(one.items()) for one in kinds[1:])):
        wrong[kind] = value
    refuses_null = type(None) not in key.types and not key.is_empty_by_default
    if refuses_null and options[0] in (int, float, bool, str):
        wrong["null"] = "null"
    for kind, value in sorted(wrong.items()):
        yield BadValue(key.name, kind, value)
    yield from beyond_its_rules(key)


def beyond_its_rules(key: Key) -> Iterator[BadValue]:
    """Values just outside the declared bounds of a key that takes a number or a string."""
    if not set(key.types) <= {int, float, str, type(None)}:
        return
    for rule in key.rules:
        if isinstance(rule, Range):
            below = rule.least - 1 if rule.with_least else rule.least
            above = 2 * rule.most if rule.with_most else rule.most
            number = int if int in key.types else float
            yield BadValue(key.name, "below", str(number(below)))
            yield BadValue(key.name, "above", str(number(above)))
        elif isinstance(rule, OneOf):
            yield BadValue(key.name, "no choice", "77" if int in key.types else "no-such-choice")


def _wrong_for(option: Any) -> dict[str, str]:
    if option is int:
        return NO_NUMBER | NO_WHOLE_NUMBER
    if option is float:
        return NO_NUMBER
    if option is bool:
        return NO_TRUTH
    if option is str:
        return NO_TEXT
    return NO_LIST if typing.get_origin(option) is list else NO_SECTION


def _is_right(value: str, options: list[Any]) -> bool:
    return value == NEVER["more than any number"] and str in options
