"""Load a YAML file into a typed dataclass, strictly."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from configs.errors import ConfigError, OverrideError
from configs.interpolation import MARK, escaped, expanded, resolved
from configs.kinds import chosen
from configs.typed import build, convert, hints_of, inside, nearest, options_of, shown
from configs.yaml_text import MAX_DEPTH, Plain, has_comment, parse

SHIPPED = Path(__file__).parent
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # libyaml, where PyYAML has it
# Characters that YAML does not allow, and line breaks, which it folds.
_NOT_IN_YAML = re.compile("[^\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_ALIKE = {"job": "task", "task": "job"}  # kinds of files with the same keys

T = TypeVar("T")
Paths = tuple[Path, ...]


def find(name: str, kind: str) -> Path:
    """The YAML file called `name`: a path, or the stem of a shipped file of that kind.

    A name with a folder or a suffix is a path, with ``~`` and variables expanded. One that begins
    with ``configs/`` is found in the shipped files too, from any working directory. Raises
    ConfigError if there is no such file.
    """
    given = Path(expanded(name))
    shipped = SHIPPED / kind / f"{name}.yaml"
    if not name:
        raise ConfigError(f"the name is empty; give the name of a {kind} config, or a path")
    if len(given.parts) == 1 and not given.suffix:
        if _is_file(shipped):
            return shipped
        if not given.is_dir():
            names = sorted(path.stem for path in (SHIPPED / kind).glob("*.yaml"))
            names += [file] if _is_file(Path(file := f"{given}.yaml")) else []
            raise ConfigError(f"{name}: no such {kind} config{nearest(name, names)}")
    if given.parts[:1] == ("configs",) and not given.exists():
        given = SHIPPED.joinpath(*given.parts[1:])
    if given.is_dir():
        has_files = any(given.glob("*.yaml"))
        remedy = "name a YAML file in it" if has_files else f"give the YAML file of a {kind} config"
        raise ConfigError(f"{name}: is a folder; {remedy}")
    if given.is_fifo():
        raise ConfigError(f"{name}: is a pipe; write its content to a file")
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
    return _loaded(_file(path, schema, kind), schema, overrides, _Place(str(path), kind))


def load_text(text: str, schema: type[T], kind: str, overrides: Sequence[str], source: str) -> T:
    """Load a config given as text, as `load` does; `source` names its origin in messages."""
    place = _Place(source, kind)
    return _loaded(_with_base(_tree(text, source), schema, place), schema, overrides, place)


def load_tree(name: str, schema: Any, kind: str) -> dict[str, Any]:
    """The keys and values of the config `name` (see `find`), not checked, without any `base`."""
    path = find(name, kind)
    return _composed(_file(path, schema, kind), schema, _Place(str(path), kind))


def validate(tree: Mapping[str, Any], schema: type[T], source: str) -> T:
    """Convert a plain mapping to `schema`; `source` names its origin in messages."""
    with _naming(source):
        return build(tree, schema)


def plain(text: str, source: str) -> dict[str, Any]:
    """Parse a config without a schema: numbers and booleans are recognised by their form.

    Raises ConfigError, which begins with `source`.
    """
    return typing.cast(dict[str, Any], convert(_tree(text, source), Any, source))


def dump(config: Any) -> str:
    """A config as YAML text, which `load` reads back into an equal dataclass."""
    tree = escaped(dataclasses.asdict(config), type(config))
    return yaml.dump(tree, Dumper=_DUMPER, sort_keys=False, allow_unicode=True)


class _Place(NamedTuple):
    """The place of a value: its file for messages, the kind of files it may name, its full key."""

    source: str
    kind: str
    key: str = ""

    def at(self, name: str) -> _Place:
        """The place of a field of the section here."""
        return _Place(self.source, name, inside(self.key, name))

    def entry(self, name: str | int) -> _Place:
        """The place of an entry of the map or list here."""
        key = f"{self.key}[{name}]" if isinstance(name, int) else inside(self.key, name)
        return self._replace(key=key)


class _Dotted(dict[str, Any]):
    """The section `a` of an override ``a.b=1``, which changes a key in it and replaces nothing."""


class _Base(Plain):
    """The name of a file by an override of ``base`` alone, which keeps the keys beside it."""


def _loaded(tree: dict[str, Any], schema: type[T], overrides: Sequence[str], place: _Place) -> T:
    for override in overrides:
        tree = _with_base(_merged(tree, _parse(override), schema, place), schema, place)
    hooks: Any = schema
    with _naming(place.source):
        if "plugins" in tree and hasattr(schema, "declare"):
            hooks.declare(resolved({"plugins": tree["plugins"]}, schema, tree))
    tree = _composed(tree, schema, place)
    with _naming(place.source):
        if hasattr(schema, "compose"):
            tree = hooks.compose(tree)
    return validate(tree, schema, place.source)


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """Put the origin of a config before the message of any ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _composed(tree: dict[str, Any], schema: Any, place: _Place) -> dict[str, Any]:
    """A tree with the contents of the files that it names, and the values of interpolations."""
    tree = _expanded(tree, schema, place)
    with _naming(place.source):
        tree = resolved(tree, schema)
    return typing.cast(dict[str, Any], _expanded(tree, schema, place))


def _file(path: Path, schema: Any, kind: str, key: str = "", above: Paths = ()) -> dict[str, Any]:
    """The tree of a file, over the one of its ``base``; its sections may still name files.

    `above` are the files that lead to it by their ``base``.
    """
    folder = path.resolve().parent
    if folder.parent == SHIPPED.resolve():
        kind = folder.name  # a shipped file names others of its own kind
    return _with_base(_read(path), schema, _Place(str(path), kind, key), (*above, path))


def _with_base(
    tree: Mapping[str, Any], schema: Any, place: _Place, above: Paths = ()
) -> dict[str, Any]:
    """The tree of a file or a section, over the one of the file that its ``base`` names."""
    tree = dict(tree)
    if not isinstance(tree.get("base"), str) or "base" in hints_of(schema):
        return tree
    path = _find_base(tree.pop("base"), schema, place)
    if path in above:
        raise ConfigError(f"{path}: base: must not lead back to this file")
    below = _file(path, schema, place.kind, place.key, above)
    return typing.cast(dict[str, Any], _merged(below, tree, schema, place))


def _find_base(name: str, schema: Any, place: _Place) -> Path:
    """The file of a ``base``, or of a section given as a name.

    A task's file has the keys of a job: each may name the other.
    """
    kind, alike = place.kind, _ALIKE.get(place.kind, place.kind)
    try:
        return find(name, alike if is_shipped(name, alike) else kind)
    except ConfigError as error:
        begins = f"{place.source}: {place.key or 'base'}:"
        if (SHIPPED / place.kind).is_dir() or not place.key:
            raise ConfigError(f"{begins} {error}") from error
        keys = ", ".join(hints_of(chosen(schema, {})))
        raise ConfigError(
            f"{begins} expected keys and values ({keys}) or a YAML file of them, not {shown(name)}"
        ) from error


def _expanded(value: Any, hint: Any, place: _Place) -> Any:
    """A value with the contents of each file in place of its name, as a section or as ``base``."""
    section, of_map, of_list = _forms(hint)
    if section and isinstance(value, str) and MARK not in value:
        value = {"base": value}
    if isinstance(value, dict) and section:
        value = _with_base(value, section, place)
        hints = hints_of(chosen(section, value))
        return {
            name: _expanded(item, hints.get(name, Any), place.at(name))
            for name, item in value.items()
        }
    if isinstance(value, dict) and of_map:
        return {name: _expanded(item, of_map, place.entry(name)) for name, item in value.items()}
    if isinstance(value, list) and of_list:
        return [_expanded(item, of_list, place.entry(number)) for number, item in enumerate(value)]
    return value


def _forms(hint: Any) -> tuple[Any, Any, Any]:
    """The dataclass of a type, and the types of the values in its map and list; None: no such."""
    section = of_map = of_list = None
    for option in options_of(hint):
        origin, inner = typing.get_origin(option), typing.get_args(option)[-1:]
        section = option if dataclasses.is_dataclass(option) else section
        of_map = inner[0] if origin is dict else of_map
        of_list = inner[0] if origin is list else of_list
    return section, of_map, of_list


def _is_by_number(hint: Any) -> bool:
    """Whether a type allows a map whose keys are steps or layers."""
    maps = [option for option in options_of(hint) if typing.get_origin(option) is dict]
    return any(int in options_of(typing.get_args(option)[0]) for option in maps)


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `changes` over `base`; a section with its own ``base`` replaces the old section."""
    return typing.cast(dict[str, Any], _merged(base, changes, Any, _Place("", "")))


def _merged(below: Any, above: Any, hint: Any, place: _Place) -> Any:
    """Merge a value of this type over another; `above` may have the indices of a list as keys.

    A null takes the place of a section, and removes a map's entry. A map by numbers is a value, and
    is replaced. A section of another kind loses the keys that are not its own. Raises ConfigError
    for an entry or an index that is not there.
    """
    section, of_map, of_list = _forms(hint)
    if not isinstance(above, dict) or _renews(above):
        return above
    if _is_by_number(hint) and not isinstance(above, _Dotted):
        return above
    if above and all(map(str.isdecimal, above)):
        if isinstance(below, list):
            return _merged_list(below, above, of_list or Any, place)
        if of_list and below is None:
            raise ConfigError(
                f"{place.source}: {place.key}: not set, so no item can be changed; give the list, "
                f"{place.key}=[...]"
            )
    if section and isinstance(below, str):
        below = {"base": below}
    if section and isinstance(below, dict) and _reads_below(above):
        below = _with_base(below, section, place)
    merged = dict(below) if isinstance(below, dict) else {}
    hints = hints_of(chosen(section, {**merged, **above})) if section else {}
    if section and chosen(section, merged) is not chosen(section, {**merged, **above}):
        # Another kind: it keeps of the keys below those that it has too.
        merged = {name: value for name, value in merged.items() if name in (*hints, "base")}
    for name, change in above.items():
        if change is None and of_map not in (None, Any) and type(None) not in options_of(of_map):
            if name not in merged:
                raise ConfigError(
                    f"{place.source}: {inside(place.key, name)}: there is no such entry to remove; "
                    f"there are: {', '.join(merged) or 'none'}"
                )
            del merged[name]
        else:
            where = place.entry(name) if of_map else place.at(name)
            inner = of_map or hints.get(name, Any)
            merged[name] = _merged(merged.get(name), change, inner, where)
    return merged


def _merged_list(below: list[Any], above: dict[str, Any], inner: Any, place: _Place) -> list[Any]:
    merged = list(below)
    for index, change in above.items():
        where = place.entry(int(index[:9]))
        if int(index[:9]) >= len(below):
            raise ConfigError(f"{where.source}: {where.key}: there are only {len(below)}")
        merged[int(index)] = _merged(merged[int(index)], change, inner, where)
    return merged


def _renews(section: Mapping[str, Any]) -> bool:
    """Whether a section names its own file, and so keeps nothing of the one that it replaces."""
    return isinstance(section.get("base"), str) and not isinstance(section["base"], _Base)


def _reads_below(change: Any) -> bool:
    """Whether what a change comes to depends on the values in the file that a section names.

    It does if it removes an entry by a null, or changes one item of a list or of a map by numbers.
    """
    if not isinstance(change, dict):
        return change is None
    is_of_item = isinstance(change, _Dotted) and all(map(str.isdecimal, change))
    return is_of_item or any(map(_reads_below, change.values()))


def assignment(key: str, value: object) -> str:
    """The ``key=value`` that sets a key to exactly this value: a path, or what JSON can hold."""
    text = json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
    return f"{key}={_NOT_IN_YAML.sub(_escaped, text)}"


def _escaped(character: re.Match[str]) -> str:
    return f"\\u{ord(character[0]):04x}"


def assigned(assignments: Sequence[str]) -> dict[str, Any]:
    """The keys that these ``key=value`` set together, as sections of strings and lists.

    Raises ConfigError for one that is not in this form.
    """
    tree: dict[str, Any] = {}
    for override in assignments:
        tree = merge(tree, _parse(override))
    return tree


def _parse(override: str) -> dict[str, Any]:
    """``a.b=1`` as {"a": {"b": 1}}, by OmegaConf's rules; the value is read as in a YAML file."""
    if not isinstance(override, str):  # as from Python
        raise OverrideError(f"{shown(override)} is not an override; write 'key=value'")
    key, *values = re.split(r"(?<!\\)=", override, maxsplit=1)
    if key.count(".") + key.count("[") >= MAX_DEPTH:
        raise ConfigError(f"{shown(key)}: no key has this many levels")
    keys = _keys_of(key.strip())
    if not values or not all(keys):
        raise OverrideError(f"{shown(override)} is not an override; write key=value")
    tree = parse(values[0], shown(override)[:60])
    if has_comment(values[0]):
        raise ConfigError(
            f"{shown(override)}: # starts a comment; put the value in quotes, {key}='\"...\"'"
        )
    if keys[-1] == "base" and isinstance(tree, str):
        tree = _Base(tree)
    for name in reversed(keys):
        tree = _Dotted({name: tree})
    return typing.cast(dict[str, Any], tree)


def _keys_of(path: str) -> list[str]:
    """``a.b[0]`` as ["a", "b", "0"], by OmegaConf's rules."""
    from omegaconf import OmegaConf

    config = OmegaConf.create()
    OmegaConf.update(config, path, "")
    keys, tree = [], OmegaConf.to_container(config)
    while isinstance(tree, dict):
        ((name, tree),) = tree.items()
        keys.append(str(name))
    return keys


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = _tree(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8; convert it, as with iconv") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
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
