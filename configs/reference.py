"""The keys that a dataclass declares, as JSON schemas and as the reference page.

They accept the same types as `configs.typed`, and check the rules of single fields. Rules across
fields (`Section.conflicts`) are only checked when a command reads the file.
"""

import dataclasses
import re
import typing
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from configs.kinds import KIND, kinds_of, must_be_named
from configs.rules import PATH, Rule, Unit
from configs.section import annotated_hints, default_of, rules_in, split
from configs.typed import options_of


@dataclass(frozen=True)
class Declared:
    """One key: its annotated type, and its default."""

    name: str
    hint: Any
    default: Any  # `dataclasses.MISSING` where the key must be set

    @property
    def is_required(self) -> bool:
        """Whether the key has no default."""
        return self.default is dataclasses.MISSING

    @property
    def doc(self) -> str:
        """The meaning of the key; empty if no text stands beside its type."""
        return next((note for note in notes_within(self.hint) if isinstance(note, str)), "")

    @property
    def unit(self) -> str:
        """The unit of its numbers; empty if the field has no `Unit`."""
        return next((note.name for note in notes_within(self.hint) if isinstance(note, Unit)), "")


def declared(schema: Any) -> list[Declared]:
    """The keys of a dataclass, in order."""
    hints = annotated_hints(schema)
    fields = [field for field in dataclasses.fields(schema) if field.init]
    return [Declared(field.name, hints[field.name], default_of(field)) for field in fields]


def explanation(schema: Any) -> list[str]:
    """The paragraphs of a dataclass's docstring, each on one line."""
    text = (schema.__doc__ or "").strip()
    if not text or text.startswith(f"{schema.__name__}("):  # made by `dataclass`
        return []
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def purpose(schema: Any) -> str:
    """The first paragraph of a dataclass's docstring."""
    return next(iter(explanation(schema)), "")


def notes_within(hint: Any) -> Iterator[Any]:
    """The `Annotated` metadata of a type, then those of its parts."""
    kind, notes = split(hint)
    yield from notes
    for part in typing.get_args(kind):
        yield from notes_within(part)


def sections_within(hint: Any) -> list[tuple[str, Any]]:
    """The dataclasses of a key, each with its suffix in a dotted key: "", "[]" or ".NAME"."""
    sections = []
    for option in options_of(split(hint)[0]):
        kind = split(option)[0]
        mark = {list: "[]", dict: ".NAME"}.get(typing.get_origin(kind), "")
        inner = split(typing.get_args(kind)[-1])[0] if mark else kind
        if dataclasses.is_dataclass(inner):
            sections.append((mark, inner))
    return sections


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
        rules = (note for note in notes_within(key.hint) if isinstance(note, Rule))
        allowed = "; ".join(dict.fromkeys(rule.words for rule in rules))
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
