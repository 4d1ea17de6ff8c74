"""The reference page: every key of every kind of YAML file, from the fields' own declarations."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from configs.declared import Declared, declared, explanation, notes_within, purpose, sections_within
from configs.kinds import kinds_of
from configs.rules import PATH, Rule
from configs.section import split
from configs.typed import options_of

_TITLES = ("key", "type", "default", "unit", "allowed", "meaning")
_WORDS = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    Any: "anything",
    type(None): "null",
}


def reference(kinds: Mapping[str, Any]) -> str:
    """Markdown with a section for each kind of file, given as its name and its dataclass."""
    page = _Page(kinds)
    return "\n\n".join(block for kind in kinds for block in page.kind(kind)) + "\n"


class _Page:
    """The page: each dataclass once, with a link wherever it is used."""

    def __init__(self, kinds: Mapping[str, Any]) -> None:
        self._kinds = kinds
        self._titles = {schema: f"{kind}: every key" for kind, schema in kinds.items()}
        self._places: dict[Any, list[str]] = {}  # of a dataclass, as dotted keys

    def kind(self, kind: str) -> Iterator[str]:
        """A kind of file, and its sections that are not kinds of files themselves."""
        root = self._kinds[kind]
        sections = list(self._walk(root, ""))
        for path, schema in sections:
            self._titles.setdefault(schema, f"{kind}: {path}")
        yield f"## {self._titles[root]}"
        yield f"Files in `configs/{kind}/`; their schema is `configs/schema/{kind}.json`."
        yield from self._keys(root)
        for schema in dict.fromkeys(schema for _, schema in sections):
            if schema in self._kinds.values():
                continue
            yield f"### {self._titles[schema]}"
            _, *others = dict.fromkeys(
                f"`{path}`" for path, section in sections if section is schema
            )
            if others:
                yield f"Also {', '.join(others)}."
            yield from self._keys(schema)

    def _walk(self, schema: Any, path: str) -> Iterator[tuple[str, Any]]:
        """The sections below a section, each by its dotted key, in depth-first order."""
        keys = (key for option in kinds_of(schema).values() or [schema] for key in declared(option))
        for key in keys:
            for mark, inner in sections_within(key.hint):
                below = f"{path}.{key.name}{mark}".removeprefix(".")
                yield below, inner
                if inner not in self._kinds.values():
                    yield from self._walk(inner, below)

    def _keys(self, schema: Any) -> Iterator[str]:
        """The meaning of a section, and its keys; those of each kind where it comes in kinds."""
        kinds = kinds_of(schema)
        yield from explanation(schema)
        if not kinds:
            yield self._table(schema)
        for name, option in kinds.items():
            yield f"#### {self._titles[schema].removesuffix(': every key')}, kind: {name}"
            yield from explanation(option)
            yield self._table(option)

    def _table(self, schema: Any) -> str:
        rows = [_TITLES, ["---"] * len(_TITLES), *map(self._row, declared(schema))]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def _row(self, key: Declared) -> list[str]:
        allowed = "; ".join(dict.fromkeys(_allowed(key.hint)))
        meaning = key.doc or " ".join(purpose(section) for _, section in sections_within(key.hint))
        cells = [f"`{key.name}`", self._type(key.hint), _default(key), key.unit, allowed, meaning]
        return [cell.replace("|", "\\|") for cell in cells]

    def _type(self, hint: Any, ending: str = "", is_path: bool = False) -> str:
        """The words for a type; `ending` is an s where there are several, texts or paths."""
        kind, notes = split(hint)
        is_path = is_path or PATH in notes
        options = options_of(kind)
        if len(options) > 1:
            return ", or ".join(self._type(option, is_path=is_path) for option in options)
        if dataclasses.is_dataclass(kind):
            return f"[section{ending}](#{_anchor(self._titles[kind])})"
        inner = typing.get_args(kind)
        if typing.get_origin(kind) is list:
            return f"list of {self._type(inner[0], 's', is_path)}"
        if typing.get_origin(kind) is dict:
            by = "name" if split(inner[0])[0] is str else self._type(inner[0])
            return f"{self._type(inner[1], 's', is_path)} by {by}"
        if kind is str and is_path:
            return f"path{ending}"
        return _WORDS[kind] + (ending if kind in (int, float, str) else "")


def _allowed(hint: Any) -> Iterator[str]:
    rules = [note for note in notes_within(hint) if isinstance(note, Rule)]
    return (rule.words for rule in rules)


def _default(key: Declared) -> str:
    if key.is_required:
        return "required"
    if dataclasses.is_dataclass(key.default):
        return ""
    text = yaml.safe_dump(key.default, default_flow_style=True, width=10**6)
    return f"`{text.removesuffix('...' + chr(10)).strip()}`"


def _anchor(title: str) -> str:
    """The anchor of a heading, as GitHub generates it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
