"""Sections of a config: dataclasses whose fields declare what is allowed, and are checked."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any

from configs.rules import Rule
from configs.typed import has_form, hints_of, inside, options_of

Refusal = tuple[str, str]  # the key, relative to this section, and why its value is refused


class Section:
    """The base of every dataclass that a YAML file is read into.

    The constructor checks the rules of each field (`configs.rules`), then the rules across fields
    (`conflicts`). The first `Refusal` is raised as a ValueError, ``key: why``.
    """

    def __post_init__(self) -> None:
        """Check the rules of each field, then the rules across fields."""
        for key, why in chain(_broken_rules(self), self.conflicts()):
            raise ValueError(f"{key}: {why}")

    def conflicts(self) -> Iterator[Refusal]:
        """Refusals by rules across fields; every value is valid by itself."""
        yield from ()


def declare_fields(schema: type[Section], kinds: Mapping[str, Any]) -> None:
    """Give a dataclass exactly these fields, each None by default, as if its body declared them.

    For a section whose keys are only known at run time.
    """
    for made in ("__init__", "__repr__", "__eq__", "__match_args__"):
        if made in vars(schema):
            delattr(schema, made)
    schema.__annotations__ = dict(kinds)
    for name in kinds:
        setattr(schema, name, None)
    dataclasses.dataclass(schema)
    annotated_hints.cache_clear()
    hints_of.cache_clear()


def within(section: str, refusals: Iterator[Refusal]) -> Iterator[Refusal]:
    """Prefix the keys of a section's refusals with its name; an empty key is the section itself."""
    for key, why in refusals:
        yield f"{section}.{key}" if key else section, why


@functools.cache
def annotated_hints(schema: Any) -> dict[str, Any]:
    """The types of a dataclass's fields, by name, with their annotations."""
    return typing.get_type_hints(schema, include_extras=True)


def split(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type, and its outermost `Annotated` metadata."""
    if typing.get_origin(hint) is not Annotated:
        return hint, ()
    kind, *notes = typing.get_args(hint)
    return kind, tuple(notes)


def rules_in(notes: tuple[Any, ...], whole: bool) -> tuple[Rule, ...]:
    """The rules for the container as a whole, or the rules for each value in it."""
    return tuple(note for note in notes if isinstance(note, Rule) and note.whole == whole)


def _broken_rules(section: Section) -> Iterator[Refusal]:
    hints = annotated_hints(typing.cast(Any, type(section)))
    for name in section.__dataclass_fields__:  # type: ignore[attr-defined]
        yield from _broken(getattr(section, name), hints[name], (), name)


def _broken(value: Any, hint: Any, each: tuple[Rule, ...], key: str) -> Iterator[Refusal]:
    """The rules that a value or its contents break; `each` are inherited from its container."""
    if value is None or dataclasses.is_dataclass(value):
        return
    kind, notes = split(hint)
    kind, more = split(_option(value, kind))
    each = (*each, *rules_in((*notes, *more), whole=False))
    is_whole = isinstance(value, list | tuple | Mapping)
    for rule in rules_in((*notes, *more), whole=True) if is_whole else each:
        if not rule.allows(value):
            yield key, rule.refusal(value)
    if is_whole:
        yield from _broken_inside(value, kind, each, key)


def _broken_inside(
    value: Sequence[Any] | Mapping[Any, Any], kind: Any, each: tuple[Rule, ...], key: str
) -> Iterator[Refusal]:
    *of_keys, inner = typing.get_args(kind) or (Any,)
    if not isinstance(value, Mapping):
        for number, one in enumerate(value):
            yield from _broken(one, inner, each, f"{key}[{number}]")
        return
    for name, one in value.items():
        for hint in of_keys:
            yield from ((key, f"a key {why}") for _, why in _broken(name, hint, (), key))
        yield from _broken(one, inner, each, inside(key, name))


def _option(value: Any, kind: Any) -> Any:
    """The member of a union that has the value's form (mapping, list or scalar)."""
    options = [one for one in options_of(kind) if one is not type(None)]
    return next((one for one in options if has_form(value, split(one)[0])), options[0])
