"""The keys that a dataclass declares, for the reference page and the JSON schema."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from configs.rules import Doc, Unit
from configs.section import annotated_hints, default_of, split
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
        """The meaning of the key; empty if the field has no `Doc`."""
        return next((note.text for note in notes_within(self.hint) if isinstance(note, Doc)), "")

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
