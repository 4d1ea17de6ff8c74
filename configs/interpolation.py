"""Interpolations (``${data.sequence_length}``, ``${oc.env:HOME}``) and the variables of paths.

OmegaConf resolves interpolations, once a config is complete. Keys declared with `VERBATIM` keep
them: shell lines, and sections for another schema. In keys declared with `PATH`, ``$SCRATCH/x`` and
``~/x`` are expanded too.
"""

import dataclasses
import os
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from configs.errors import ConfigError
from configs.kinds import chosen
from configs.rules import PATH, VERBATIM
from configs.section import annotated_hints, default_of, split
from configs.typed import has_form, options_of
from configs.yaml_text import Plain

MARK = "${"
_Keys = tuple[str | int, ...]
_Change = Callable[[str, tuple[Any, ...], _Keys], Any]


def resolved(
    tree: Mapping[str, Any], schema: Any, root: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The tree of a config with every interpolation resolved, and every path expanded.

    root: the tree that interpolations look into; None: `tree` itself, with the defaults of the
    `schema`. Raises ConfigError, ``key: why``.
    """
    values: Any = None

    def change(text: str, notes: tuple[Any, ...], keys: _Keys) -> Any:
        nonlocal values
        if VERBATIM in notes:
            return text
        if MARK in text and values is None:
            values = _omegaconf(root or tree, schema)
        try:
            value = _value_at(values, keys) if MARK in text else text
            is_path = PATH in notes and isinstance(value, str)
            return type(value)(expanded(value)) if is_path else value
        except ConfigError as error:
            raise ConfigError(f"{_dotted(keys)}: {error}") from error

    return typing.cast(dict[str, Any], _changed(tree, schema, change))


def escaped(tree: Mapping[str, Any], schema: Any) -> dict[str, Any]:
    """The tree of a resolved config, written so that `resolved` gives it back."""

    def change(text: str, notes: tuple[Any, ...], keys: _Keys) -> str:
        return text if VERBATIM in notes else re.sub(r"(\\*)\$\{", r"\1\1\\${", text)

    return typing.cast(dict[str, Any], _changed(tree, schema, change))


def expanded(path: str) -> str:
    """A path with ``~`` and the variables of the environment replaced, such as ``$SCRATCH``.

    An absolute path at which there is something stays as it is: its folders have these names.
    Raises ConfigError for a variable that is not set, unless there is a file of exactly this name.
    """
    if os.path.isabs(path) and os.path.lexists(path):
        return path
    full = os.path.expanduser(os.path.expandvars(path))
    unset = re.search(r"\$(\w+)", full)
    if unset and "://" not in path:
        if not os.path.lexists(path):
            raise ConfigError(f"{path}: {unset[0]} is not set in the environment")
        return path
    return full


def _omegaconf(tree: Mapping[str, Any], schema: Any) -> Any:
    """The tree and the schema's defaults as a container of OmegaConf."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def blank(text: str, notes: tuple[Any, ...], keys: _Keys) -> str:
        return "" if VERBATIM in notes else text

    full = _with_defaults(_changed(tree, schema, blank), schema)
    try:
        return OmegaConf.create(full, flags={"allow_objects": True})
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {_first_line(error)}") from error


def _value_at(values: Any, keys: _Keys) -> Any:
    """The value of a key; a text, which the schema reads as if it had no quotes."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        for key in keys:
            values = values[key]
        if OmegaConf.is_config(values):
            return OmegaConf.to_container(values, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(_first_line(error)) from error
    return Plain(values) if isinstance(values, str) else values


def _first_line(error: BaseException) -> str:
    line = str(error).partition("\n")[0] or type(error).__name__
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", line).strip('"')


def _with_defaults(value: Any, hint: Any) -> Any:
    """A tree with the default of every key that its sections leave out."""
    if not isinstance(value, Mapping):
        return value
    schema, hints = _section(hint, value)
    defaults = dataclasses.fields(schema) if schema else ()
    return {field.name: _plain(default_of(field)) for field in defaults} | {
        name: _with_defaults(item, hints.get(name, Any)) for name, item in value.items()
    }


def _plain(default: Any) -> Any:
    """A default as plain data; a value that must be set as OmegaConf's mark of it."""
    if default is dataclasses.MISSING:
        return "???"
    is_section = dataclasses.is_dataclass(default) and not isinstance(default, type)
    return dataclasses.asdict(default) if is_section else default


def _changed(
    value: Any, hint: Any, change: _Change, keys: _Keys = (), notes: tuple[Any, ...] = ()
) -> Any:
    """A tree with ``change(text, notes, keys)`` in place of each text.

    notes: the metadata of the text's type, `hint`, and of the containers that it is in.
    """
    kind, more = split(hint)
    notes = (*notes, *more, *(note for option in options_of(kind) for note in split(option)[1]))
    if isinstance(value, str):
        return change(value, (*notes, VERBATIM) if kind is Any else notes, keys)
    if isinstance(value, list):
        inner = _inner(hint, value)
        return [
            _changed(item, inner, change, (*keys, number), notes)
            for number, item in enumerate(value)
        ]
    if not isinstance(value, Mapping):
        return value
    schema, hints = _section(hint, value)
    notes = () if schema else notes
    return {
        name: _changed(item, hints.get(name, Any), change, (*keys, name), notes)
        for name, item in value.items()
    }


def _section(hint: Any, value: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """The dataclass that a mapping is for, or None for a map, and the types of its values."""
    for option in options_of(split(hint)[0]):
        if dataclasses.is_dataclass(option):
            schema = chosen(option, value)
            return schema, annotated_hints(schema)
    return None, dict.fromkeys(value, _inner(hint, value))


def _inner(hint: Any, value: Any) -> Any:
    """The type of the values in a container of this type; Any if it is no container."""
    options = (split(option)[0] for option in options_of(split(hint)[0]))
    container = next((option for option in options if has_form(value, option)), Any)
    return (typing.get_args(container) or (Any,))[-1]


def _dotted(keys: _Keys) -> str:
    """Keys as ``a.b[0].c``."""
    parts = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return "".join(parts).removeprefix(".")
