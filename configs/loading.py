"""Load a YAML file into a typed dataclass, strictly."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

SHIPPED = Path(__file__).parent

T = TypeVar("T")


class ConfigError(ValueError):
    """Something in a configuration that its author can fix; the message is one line."""


def find(name: str, kind: str) -> Path:
    """The YAML file called `name`: a path, or the stem of a shipped file of that kind.

    A name with a folder or an ending in it is a path. One that begins with ``configs/`` is found in
    the shipped files from any working directory. Raises ConfigError when there is no such file.
    """
    given = Path(name)
    shipped = SHIPPED / kind / f"{name}.yaml"
    if len(given.parts) == 1 and not given.suffix:
        if shipped.is_file():
            return shipped
        names = sorted(path.stem for path in (SHIPPED / kind).glob("*.yaml"))
        raise ConfigError(f"{name}: no such {kind} config{_nearest(name, names)}")
    if given.parts[:1] == ("configs",) and not given.exists():
        given = SHIPPED.joinpath(*given.parts[1:])
    if given.is_dir():
        raise ConfigError(f"{name}: is a folder; give a YAML file in it")
    if not given.is_file():
        names = sorted(path.name for path in given.parent.glob("*.yaml"))
        raise ConfigError(f"{name}: no such file{_nearest(given.name, names)}")
    return given


def load(name: str, schema: type[T], kind: str, overrides: Sequence[str] = ()) -> T:
    """Read the config `name` (see `find`), apply ``key=value`` overrides, check against `schema`.

    Overrides apply from left to right. Raises ConfigError, one line naming the file and the key,
    for anything that does not fit.
    """
    path = find(name, kind)
    return _overridden({"base": str(path)}, schema, kind, overrides, str(path))


def load_text(text: str, schema: type[T], kind: str, overrides: Sequence[str], source: str) -> T:
    """The same for a config that was kept as text; `source` names its origin in messages."""
    return _overridden(_tree(text, source), schema, kind, overrides, source)


def _overridden(
    tree: dict[str, Any], schema: type[T], kind: str, overrides: Sequence[str], source: str
) -> T:
    tree = _expand(tree, schema, kind)
    for override in overrides:
        tree = _expand(_merge(tree, _parse(override)), schema, kind)
    return validate(tree, schema, source)


def validate(tree: Mapping[str, Any], schema: type[T], source: str) -> T:
    """Turn a plain mapping into `schema`; `source` names its origin in messages."""
    _check_keys(tree, schema, source, prefix="")
    with _named_keys(source, prefix=""):
        config = OmegaConf.merge(OmegaConf.structured(schema), tree)
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise ConfigError(f"{source}: {missing[0]} must be set")
        _refuse_infinite(OmegaConf.to_container(config), source, path="")
        return typing.cast(T, _instantiate(config, source))


def dump(config: Any) -> str:
    """The YAML text that `load` reads back into an equal dataclass."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _expand(
    tree: Mapping[str, Any], schema: Any, kind: str, above: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """Replace names and ``base`` keys by the contents of the files they mean, depth first.

    `above` are the files that this tree was reached from through ``base``.
    """
    tree = dict(tree)
    if isinstance(tree.get("base"), str) and not _has_field(schema, "base"):
        path = find(tree.pop("base"), kind)
        if path in above:
            raise ConfigError(f"{path}: is its own base")
        tree = _merge(_expand(_read(path), schema, kind, (*above, path)), tree)
    for name, section in _sections(schema).items():
        if name in tree:
            tree[name] = _expand_section(tree[name], section, name)
    return tree


def _expand_section(value: Any, section: _Section, kind: str) -> Any:
    if value is None:
        return None if section.optional else [] if section.container is list else {}
    one = dataclasses.replace(section, container=None, optional=False)
    if section.container is dict and isinstance(value, dict):
        return {key: _expand_section(item, one, kind) for key, item in value.items()}
    if section.container is list and isinstance(value, list):
        return [_expand_section(item, one, kind) for item in value]
    if section.container is None and isinstance(value, str):
        value = {"base": value}
    if section.container is None and isinstance(value, dict):
        return _expand(value, section.schema, kind)
    return value


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` over `base`; a section that names a ``base`` of its own starts from nothing."""
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        renewed = isinstance(value, dict) and isinstance(value.get("base"), str)
        if isinstance(value, dict) and isinstance(below, dict) and not renewed:
            merged[key] = _merge(below, value)
        else:
            merged[key] = value
    return merged


def _parse(override: str) -> dict[str, Any]:
    """``a.b=1`` as {"a": {"b": 1}}; the value is read as in a YAML file."""
    key, equals, _ = override.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{override!r} is not an override; write key=value")
    try:
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([override]))
    except yaml.YAMLError as error:
        raise ConfigError(f"{override!r}: the value is not valid YAML") from error
    return typing.cast(dict[str, Any], tree)


def _read(path: Path) -> dict[str, Any]:
    try:
        return _tree(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _tree(text: str, source: str) -> dict[str, Any]:
    try:
        read = OmegaConf.load(io.StringIO(text))  # unlike plain YAML, 1e-4 is a float
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error
    tree = OmegaConf.to_container(read)
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: expected keys and values at the top")
    return typing.cast(dict[str, Any], tree)


@dataclasses.dataclass(frozen=True)
class _Section:
    """A field that holds a dataclass, or several in a `container` (dict by name, or list)."""

    schema: Any
    container: type[dict[Any, Any]] | type[list[Any]] | None
    optional: bool

    def children(self, value: Any, path: str) -> dict[str, Any]:
        """The dataclasses' own trees in the field's `value`, each by its full key."""
        if self.container is dict and isinstance(value, Mapping):
            return {f"{path}.{name}": child for name, child in value.items()}
        if self.container is list and isinstance(value, list):
            return {f"{path}[{number}]": child for number, child in enumerate(value)}
        return {path: value}


def _sections(schema: Any) -> dict[str, _Section]:
    found = {}
    for name, hint in typing.get_type_hints(schema).items():
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        options = typing.get_args(hint) if is_union else (hint,)
        for option in options:
            container = typing.get_origin(option)
            inner = typing.get_args(option)[-1] if container in (dict, list) else option
            if dataclasses.is_dataclass(inner):
                found[name] = _Section(inner, container, type(None) in options)
    return found


def _has_field(schema: Any, name: str) -> bool:
    return any(field.name == name for field in dataclasses.fields(schema))


def _check_keys(tree: Mapping[Any, Any], schema: Any, source: str, prefix: str) -> None:
    """Refuse keys that `schema` does not have, and sections that are not keys and values."""
    names = [field.name for field in dataclasses.fields(schema)]
    sections = _sections(schema)
    for key, value in tree.items():
        if key not in names:
            raise ConfigError(f"{source}: unknown key {prefix}{key}{_nearest(str(key), names)}")
        if key not in sections or value is None:
            continue
        if sections[key].container is list and not isinstance(value, list):
            raise ConfigError(f"{source}: {prefix}{key}: expected a list, not {value}")
        for path, child in sections[key].children(value, f"{prefix}{key}").items():
            if not isinstance(child, Mapping):
                raise ConfigError(f"{source}: {path}: expected keys and values, not {child}")
            _check_keys(child, sections[key].schema, source, f"{path}.")
            if sections[key].container is list:  # OmegaConf names only the end of such a key
                with _named_keys(source, f"{path}."):
                    OmegaConf.merge(OmegaConf.structured(sections[key].schema), child)


def _refuse_infinite(tree: Any, source: str, path: str) -> None:
    """Refuse NaN and infinity: no key has a use for them, and NaN passes comparisons."""
    if isinstance(tree, float) and not math.isfinite(tree):
        raise ConfigError(f"{source}: {path}: must be a finite number, not {tree}")
    if isinstance(tree, dict):
        for key, value in tree.items():
            _refuse_infinite(value, source, f"{path}.{key}" if path else str(key))
    if isinstance(tree, list):
        for number, value in enumerate(tree):
            _refuse_infinite(value, source, f"{path}[{number}]")


@contextlib.contextmanager
def _named_keys(source: str, prefix: str) -> Iterator[None]:
    """Makes what OmegaConf refuses a ConfigError that names the full key."""
    try:
        yield
    except OmegaConfBaseException as error:
        key = f"{prefix}{error.full_key}: " if error.full_key else ""
        reason = str(error.msg or error).splitlines()[0]
        raise ConfigError(f"{source}: {key}{reason}") from error


def _instantiate(config: Any, source: str) -> Any:
    """`config` as dataclasses; a section's own complaint gets the section's path before it."""
    for path, section in _innermost_first(config):
        try:
            instance = OmegaConf.to_object(section)
        except OmegaConfBaseException:
            raise
        except ValueError as error:
            message = str(error)
            prefix = f"{path}." if path and not message.startswith(f"{path}.") else ""
            raise ConfigError(f"{source}: {prefix}{message}") from error
    return instance


def _innermost_first(config: Any, path: str = "") -> Iterator[tuple[str, DictConfig]]:
    if isinstance(config, ListConfig):
        for number, value in enumerate(config):
            yield from _innermost_first(value, f"{path}[{number}]")
    elif isinstance(config, DictConfig):
        for key, value in config.items():
            yield from _innermost_first(value, f"{path}.{key!s}" if path else str(key))
        yield path, config


def _nearest(name: str, candidates: Sequence[str]) -> str:
    match = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    if match:
        return f"; did you mean {match[0]}?"
    return f"; there are: {', '.join(candidates)}" if candidates else ""
