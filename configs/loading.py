"""Load a YAML file into a typed dataclass, strictly."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from configs.errors import ConfigError
from configs.kinds import chosen
from configs.typed import (
    SectionField,
    build,
    convert,
    hints_of,
    inside,
    nearest,
    options_of,
    sections_of,
    shown,
)
from configs.yaml_text import MAX_DEPTH, parse

SHIPPED = Path(__file__).parent
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # libyaml, where PyYAML has it
# Characters that YAML does not allow, and line breaks, which it folds.
_NOT_IN_YAML = re.compile("[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

T = TypeVar("T")


def find(name: str, kind: str) -> Path:
    """The YAML file called `name`: a path, or the stem of a shipped file of that kind.

    A name with a folder or a suffix is a path. A path that begins with ``configs/`` is found in the
    shipped files too, from any working directory. Raises ConfigError if there is no such file.
    """
    given = Path(name)
    shipped = SHIPPED / kind / f"{name}.yaml"
    if not name:
        raise ConfigError(f"the name is empty; give the name of a {kind} config, or a path")
    if len(given.parts) == 1 and not given.suffix:
        if _is_file(shipped):
            return shipped
        names = sorted(path.stem for path in (SHIPPED / kind).glob("*.yaml"))
        raise ConfigError(f"{name}: no such {kind} config{nearest(name, names)}")
    if given.parts[:1] == ("configs",) and not given.exists():
        given = SHIPPED.joinpath(*given.parts[1:])
    if given.is_dir():
        raise ConfigError(f"{name}: is a folder; name a YAML file in it")
    if not _is_file(given):
        names = sorted(path.name for path in given.parent.glob("*.yaml"))
        raise ConfigError(f"{name}: no such file{nearest(given.name, names)}")
    return given


def is_shipped(name: str, kind: str) -> bool:
    """Whether `name`, without a folder, is the stem of a shipped file of that kind."""
    return "/" not in name and _is_file(SHIPPED / kind / f"{name}.yaml")


def load(name: str, schema: type[T], kind: str, overrides: Sequence[str] = ()) -> T:
    """Read the config `name` (see `find`), apply ``key=value`` overrides, check against `schema`.

    Overrides apply from left to right. Raises ConfigError, one line that names the file and the
    key, for anything invalid.
    """
    path = find(name, kind)
    return _overridden(_read(path), schema, kind, overrides, _Origin(str(path), (path,)))


def load_text(text: str, schema: type[T], kind: str, overrides: Sequence[str], source: str) -> T:
    """As `load`, for a config given as text; `source` names its origin in messages."""
    return _overridden(_tree(text, source), schema, kind, overrides, _Origin(source))


def load_tree(name: str, schema: Any, kind: str) -> dict[str, Any]:
    """The keys and values of the config `name` (see `find`), not checked, without any `base`."""
    path = find(name, kind)
    return _expand(_read(path), schema, kind, "", _Origin(str(path), (path,)))


def validate(tree: Mapping[str, Any], schema: type[T], source: str) -> T:
    """Convert a plain mapping to `schema`; `source` names its origin in messages."""
    try:
        return build(tree, schema)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def plain(text: str, source: str) -> dict[str, Any]:
    """Parse a config without a schema: numbers and booleans are recognised by their form.

    Raises ConfigError, which begins with `source`.
    """
    return typing.cast(dict[str, Any], convert(_tree(text, source), Any, source))


def dump(config: Any) -> str:
    """A config as YAML text, which `load` reads back into an equal dataclass."""
    tree = dataclasses.asdict(config)
    return yaml.dump(tree, Dumper=_DUMPER, sort_keys=False, allow_unicode=True)


@dataclasses.dataclass(frozen=True)
class _Origin:
    """The source of a tree: its file's name, and the files that lead to it through ``base``."""

    source: str
    above: tuple[Path, ...] = ()

    @property
    def shipped_kind(self) -> str:
        """The folder of ``configs/`` that the file which is read is in; empty: none."""
        folder = self.above[-1].resolve().parent if self.above else Path()
        return folder.name if folder.parent == SHIPPED.resolve() else ""


def _overridden(
    tree: dict[str, Any], schema: type[T], kind: str, overrides: Sequence[str], origin: _Origin
) -> T:
    tree = _expand(tree, schema, kind, "", origin)
    for override in overrides:
        changed = _merged(tree, _parse(override), schema, origin.source)
        tree = _expand(changed, schema, kind, "", _Origin(origin.source))
    prepare = getattr(schema, "prepare", None)
    if prepare is not None:
        _prepare(prepare, tree, origin.source)
        tree = _expand(tree, schema, kind, "", _Origin(origin.source))
    return validate(tree, schema, origin.source)


def _prepare(prepare: Callable[[dict[str, Any]], None], tree: dict[str, Any], source: str) -> None:
    """Let a schema add the keys that the config itself names, by its class method ``prepare``."""
    try:
        prepare(tree)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _expand(
    tree: Mapping[str, Any], schema: Any, kind: str, key: str, origin: _Origin
) -> dict[str, Any]:
    """Replace names and ``base`` keys by the contents of their files, depth first.

    `key` is the section's full key.
    """
    tree = dict(tree)
    if isinstance(tree.get("base"), str) and "base" not in hints_of(schema):
        kind = origin.shipped_kind or kind  # a shipped file names others of its own kind
        path = _find_base(tree.pop("base"), schema, kind, key, origin)
        if path in origin.above:
            raise ConfigError(f"{path}: base: must not lead back to this file")
        below = _expand(_read(path), schema, kind, key, _Origin(str(path), (*origin.above, path)))
        tree = _merged(below, tree, schema, origin.source, key)
    for name, section in sections_of(chosen(schema, tree)).items():
        if name in tree:
            tree[name] = _expand_section(tree[name], section, name, inside(key, name), origin)
    return tree


def _expand_section(value: Any, section: SectionField, kind: str, key: str, origin: _Origin) -> Any:
    one = dataclasses.replace(section, container=None)
    if section.container is dict and isinstance(value, dict):
        return {
            name: _expand_section(item, one, kind, inside(key, name), origin)
            for name, item in value.items()
        }
    if section.container is list and isinstance(value, list):
        return [
            _expand_section(item, one, kind, f"{key}[{number}]", origin)
            for number, item in enumerate(value)
        ]
    if section.container is None and isinstance(value, str):
        value = {"base": value}
    if section.container is None and isinstance(value, dict):
        return _expand(value, section.schema, kind, key, _Origin(origin.source))
    return value


def _find_base(name: str, schema: Any, kind: str, key: str, origin: _Origin) -> Path:
    """The file of a ``base``, or of a section given as a name."""
    try:
        return find(name, kind)
    except ConfigError as error:
        place = f"{origin.source}: {key}: " if key else f"{origin.source}: base: "
        if (SHIPPED / kind).is_dir() or not key:
            raise ConfigError(f"{place}{error}") from error
        keys = ", ".join(hints_of(chosen(schema, {})))
        raise ConfigError(
            f"{place}expected keys and values ({keys}) or a YAML file of them, not {shown(name)}"
        ) from error


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `changes` over `base`; a section with its own ``base`` replaces the old section."""
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        renewed = isinstance(value, dict) and isinstance(value.get("base"), str)
        if isinstance(value, dict) and isinstance(below, dict) and not renewed:
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


def _merged(
    base: Mapping[str, Any], changes: Mapping[str, Any], schema: Any, source: str, key: str = ""
) -> dict[str, Any]:
    """Merge `changes` over `base`; a null takes the place of a section, and removes a map's entry.

    `key` is the full key of this section. Raises ConfigError for an entry that is not there.
    """
    merged = merge(base, changes)
    for name, hint in hints_of(chosen(schema, merged)).items():
        before, change = base.get(name), changes.get(name)
        if not isinstance(change, dict):
            continue
        before = before if isinstance(before, dict) else {}
        place = inside(key, name)
        option = next((one for one in options_of(hint) if one is not type(None)), hint)
        if dataclasses.is_dataclass(option) and "base" not in change:
            merged[name] = _merged(before, change, option, source, place)
        elif typing.get_origin(option) is dict:
            merged[name] = _merged_map(before, change, typing.get_args(option)[-1], source, place)
    return merged


def _merged_map(
    base: Mapping[str, Any], changes: Mapping[str, Any], kind: Any, source: str, key: str
) -> dict[str, Any]:
    """Merge the entries of a map, whose values are of this `kind`, as `_merged` does."""
    merged = merge(base, changes)
    for name, change in changes.items():
        if change is None and kind is not Any and type(None) not in options_of(kind):
            if name not in base:
                there = ", ".join(base) or "none"
                raise ConfigError(
                    f"{source}: {inside(key, name)}: there is no such entry to remove; "
                    f"there are: {there}"
                )
            del merged[name]
        elif dataclasses.is_dataclass(kind) and isinstance(change, dict) and "base" not in change:
            before = base.get(name)
            below = before if isinstance(before, dict) else {}
            merged[name] = _merged(below, change, kind, source, inside(key, name))
    return merged


def assignment(key: str, value: object) -> str:
    """The ``key=value`` that sets a key to exactly this value: a path, or what JSON can hold."""
    text = json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
    return f"{key}={_NOT_IN_YAML.sub(_escaped, text)}"


def _escaped(character: re.Match[str]) -> str:
    return f"\\u{ord(character[0]):04x}"


def assigned(assignments: Sequence[str]) -> dict[str, Any]:
    """What all these ``key=value`` set together, as sections of strings and lists.

    Raises ConfigError for one that is not in this form.
    """
    tree: dict[str, Any] = {}
    for one in assignments:
        tree = merge(tree, _parse(one))
    return tree


def _parse(override: str) -> dict[str, Any]:
    """``a.b=1`` as {"a": {"b": 1}}; the value is read as in a YAML file."""
    key, equals, value = override.partition("=")
    names = key.split(".")
    if not equals or not all(names):
        raise ConfigError(f"{shown(override)} is not an override; write key=value")
    if len(names) > MAX_DEPTH:
        raise ConfigError(f"{shown(key)}: no key has this many levels")
    tree = parse(value, shown(override)[:60])
    for name in reversed(names):
        tree = {name: tree}
    return typing.cast(dict[str, Any], tree)


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = _tree(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not tree:
        raise ConfigError(f"{path}: is empty; to change nothing, write {{base: NAME}}")
    return tree


def _tree(text: str, source: str) -> dict[str, Any]:
    tree = parse(text, source)
    if not isinstance(tree, dict | None):
        raise ConfigError(f"{source}: expected keys and values at the top")
    return tree or {}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False
