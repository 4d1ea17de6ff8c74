"""Sections of a config: dataclasses whose fields declare what is allowed, and are checked."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

from configs.rules import Rule
from configs.typed import has_form, hints_of, inside, options_of

Refusal = tuple[str, str]  # the key, relative to this section, and why its value is refused
_CONTAINERS = (list, tuple, Mapping)


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

    def changed(self, *keys: str) -> Iterator[str]:
        """The `keys` whose values differ from their defaults.

        For `conflicts`: a key that has no effect is refused only where it was set to something.
        """
        fields = typing.cast(Any, self).__dataclass_fields__
        return (key for key in keys if getattr(self, key) != default_of(fields[key]))


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a field; `dataclasses.MISSING` if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def declare_fields(schema: type[Section], kinds: Mapping[str, Any]) -> None:
    """Give a dataclass exactly these fields, each None by default, as if its body declared them.

    For a section whose keys are only known at run time. Nothing changes if it has these fields.
    """
    if list(vars(schema).get("__annotations__", {}).items()) == list(kinds.items()):
        return
    for made in ("__init__", "__repr__", "__eq__", "__match_args__"):
        if made in vars(schema):
            delattr(schema, made)
    schema.__annotations__ = dict(kinds)
    for name in kinds:
        setattr(schema, name, None)
    dataclasses.dataclass(schema)
    read_types_again()


def read_types_again() -> None:
    """Forget what was read of dataclasses' types, since one of them has changed."""
    for cached in (annotated_hints, hints_of, _declared):
        cached.cache_clear()


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


def rules_in(notes: tuple[Any, ...], of_container: bool) -> tuple[Rule, ...]:
    """The rules for the container as a whole, or the rules for each value in it."""
    return tuple(note for note in notes if isinstance(note, Rule) and note.whole == of_container)


@dataclass(frozen=True)
class _Form:
    """A type that a value may have, with the rules that are declared beside it."""

    kind: Any
    each: tuple[Rule, ...]  # for a scalar, or for each value in a container
    whole: tuple[Rule, ...]  # for the container itself

    @functools.cached_property
    def keys(self) -> tuple[tuple[_Form, ...], ...]:
        """The forms of a mapping's keys; empty for other containers."""
        return tuple(map(_forms, typing.get_args(self.kind)[:-1]))

    @functools.cached_property
    def inner(self) -> tuple[_Form, ...]:
        """The forms of the values in a container."""
        return _forms((typing.get_args(self.kind) or (Any,))[-1])


def _forms(hint: Any) -> tuple[_Form, ...]:
    """The forms of a type, or of each member of a union but None."""
    kind, notes = split(hint)
    forms = []
    for option in options_of(kind):
        if option is not type(None):
            bare, more = split(option)
            rules = [rules_in((*notes, *more), of_container) for of_container in (False, True)]
            forms.append(_Form(bare, *rules))
    return tuple(forms)


@functools.cache
def _declared(schema: Any) -> dict[str, tuple[_Form, ...]]:
    """The forms of each field. A job makes thousands of sections, of few dataclasses."""
    hints = annotated_hints(schema)
    return {name: _forms(hints[name]) for name in schema.__dataclass_fields__}


def _broken_rules(section: Section) -> Iterator[Refusal]:
    for name, forms in _declared(typing.cast(Any, type(section))).items():
        yield from _broken(getattr(section, name), forms, (), name)


def _broken(
    value: Any, forms: tuple[_Form, ...], each: tuple[Rule, ...], key: str
) -> Iterator[Refusal]:
    """The rules that a value or its contents break; `each` are inherited from its container."""
    if value is None or dataclasses.is_dataclass(value):
        return
    form = _form_of(value, forms)
    each = (*each, *form.each)
    is_whole = isinstance(value, _CONTAINERS)
    for rule in form.whole if is_whole else each:
        if not rule.allows(value):
            yield key, rule.refusal(value)
    if is_whole:
        yield from _broken_inside(value, form, each, key)


def _broken_inside(
    value: Sequence[Any] | Mapping[Any, Any], form: _Form, each: tuple[Rule, ...], key: str
) -> Iterator[Refusal]:
    if not isinstance(value, Mapping):
        for number, item in enumerate(value):
            yield from _broken(item, form.inner, each, f"{key}[{number}]")
        return
    for name, item in value.items():
        for forms in form.keys:
            yield from ((key, f"a key {why}") for _, why in _broken(name, forms, (), key))
        yield from _broken(item, form.inner, each, inside(key, name))


def _form_of(value: Any, forms: tuple[_Form, ...]) -> _Form:
    """The form that the value has (mapping, list or scalar)."""
    if len(forms) == 1:
        return forms[0]
    return next((form for form in forms if has_form(value, form.kind)), forms[0])
