"""Load a YAML file into a typed dataclass, strictly."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

SHIPPED = Path(__file__).parent

T = TypeVar("T")


class ConfigError(ValueError):
    """Something in a configuration that its author can fix; the message is one line."""


def find(name: str, kind: str) -> Path:
    """The YAML file called `name`: a path, or the stem of a shipped file of that kind.

    A path that begins with ``configs/`` is found in the shipped files from any working directory.
    Raises ConfigError with the nearest shipped name when there is none.
    """
    given = Path(name)
    if given.is_file():
        return given
    if given.parts[:1] == ("configs",) and SHIPPED.joinpath(*given.parts[1:]).is_file():
        return SHIPPED.joinpath(*given.parts[1:])
    shipped = SHIPPED / kind / f"{name}.yaml"
    if shipped.is_file():
        return shipped
    names = sorted(path.stem for path in (SHIPPED / kind).glob("*.yaml"))
    raise ConfigError(f"{name}: no such {kind} config{_nearest(given.stem, names)}")


def load(name: str, schema: type[T], kind: str, overrides: Sequence[str] = ()) -> T:
    """Read the config `name` (see `find`), apply ``key=value`` overrides, check it against `schema`.

    Raises ConfigError, one line naming the file and the key, for anything that does not fit.
    """
    path = find(name, kind)
    tree = _expand({"base": str(path)}, schema, kind)
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"{override!r} is not an override; write key=value")
    tree = OmegaConf.merge(tree, OmegaConf.from_dotlist(list(overrides)))
    plain = OmegaConf.to_container(tree)
    assert isinstance(plain, dict)
    return validate(_expand(plain, schema, kind), schema, str(path))


def validate(tree: dict[str, Any], schema: type[T], source: str) -> T:
    """Turn a plain mapping into `schema`; `source` names its origin in messages."""
    _refuse_unknown_keys(tree, schema, source, prefix="")
    try:
        config = OmegaConf.merge(OmegaConf.structured(schema), tree)
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise ConfigError(f"{source}: {missing[0]} must be set")
        return typing.cast(T, OmegaConf.to_object(config))
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        reason = str(error.msg or error).splitlines()[0]
        raise ConfigError(f"{source}: {key}{reason}") from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from error


def dump(config: Any) -> str:
    """The YAML text that `load` reads back into an equal dataclass."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _expand(tree: dict[str, Any], schema: Any, kind: str) -> dict[str, Any]:
    """Replace names and ``base`` keys by the contents of the files they mean, depth first."""
    tree = dict(tree)
    if "base" in tree and not _has_field(schema, "base"):
        path = find(str(tree.pop("base")), kind)
        base = _expand(_read(path), schema, kind)
        merged = OmegaConf.to_container(OmegaConf.merge(base, tree))
        assert isinstance(merged, dict)
        tree = merged
    for field in dataclasses.fields(schema):
        inner, is_mapping = _section(schema, field.name)
        value = tree.get(field.name)
        if inner is None or value is None:
            continue
        if is_mapping and isinstance(value, dict):
            tree[field.name] = {
                key: _expand(_named(item), inner, field.name) for key, item in value.items()
            }
        elif not is_mapping and isinstance(value, (str, dict)):
            tree[field.name] = _expand(_named(value), inner, field.name)
    return tree


def _named(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"base": value}


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))  # unlike plain YAML, reads 1e-4 as a float
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected keys and values at the top")
    return typing.cast(dict[str, Any], tree)


def _has_field(schema: Any, name: str) -> bool:
    return any(field.name == name for field in dataclasses.fields(schema))


def _section(schema: Any, name: str) -> tuple[Any, bool]:
    """The dataclass behind a field, if any, and whether the field maps names to it."""
    hint = typing.get_type_hints(schema)[name]
    if typing.get_origin(hint) is dict:
        inner = typing.get_args(hint)[1]
        return (inner if dataclasses.is_dataclass(inner) else None), True
    candidates = [hint, *typing.get_args(hint)]
    return next((one for one in candidates if dataclasses.is_dataclass(one)), None), False


def _refuse_unknown_keys(tree: dict[str, Any], schema: Any, source: str, prefix: str) -> None:
    names = [field.name for field in dataclasses.fields(schema)]
    for key, value in tree.items():
        if key not in names:
            raise ConfigError(f"{source}: unknown key {prefix}{key}{_nearest(str(key), names)}")
        inner, is_mapping = _section(schema, key)
        if inner is None or not isinstance(value, dict):
            continue
        children = value.items() if is_mapping else [("", value)]
        for child, subtree in children:
            if isinstance(subtree, dict):
                path = f"{prefix}{key}.{child}." if child else f"{prefix}{key}."
                _refuse_unknown_keys(subtree, inner, source, path)


def _nearest(name: str, candidates: Sequence[str]) -> str:
    match = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    return f"; did you mean {match[0]}?" if match else f"; there are: {', '.join(candidates)}"
