"""Writing JSON that every parser accepts, and reading JSON back against a schema."""

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from configs.errors import ConfigError
from configs.typed import build, hints_of, options_of

T = TypeVar("T")
DEEPEST = 100  # levels: what reads a tree goes down by recursion


def strict_json(tree: Any) -> str:
    """Plain data as indented, strict JSON: non-finite numbers become null."""
    return json.dumps(finite(tree), indent=2, allow_nan=False)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError if the text is not JSON, or is nested too deeply."""
    try:
        tree = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    level = [tree]
    for _ in range(DEEPEST):
        within = [value for value in level if isinstance(value, (dict, list))]
        level = [
            inner
            for value in within
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return tree
    raise ValueError("nested too deeply")


def read_json(path: Path) -> Any:
    """The content of a small JSON file. Raises ConfigError, naming it; OSError if unreadable."""
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path}: is damaged: not JSON ({error})") from None


def from_json(tree: Any, schema: type[T], source: str | Path) -> T:
    """The JSON that a program of ours has written, checked against a dataclass as YAML is.

    Keys that the dataclass does not have are left out: another version may write more. Raises
    ConfigError, ``source: key: why``.
    """
    try:
        return build(_known(tree, schema), schema)
    except ConfigError as error:
        raise ConfigError(f"{source}: {str(error).removeprefix(': ')}") from None


def _known(value: Any, hint: Any) -> Any:
    """The value without the keys that its dataclass does not have."""
    options = options_of(hint)
    section = next((option for option in options if dataclasses.is_dataclass(option)), None)
    if section is not None and isinstance(value, Mapping):
        hints = hints_of(typing.cast(Any, section))
        return {key: _known(value[key], hints[key]) for key in value if key in hints}
    inner = next((args[-1] for option in options if (args := typing.get_args(option))), Any)
    if isinstance(value, Mapping):
        return {key: _known(item, inner) for key, item in value.items()}
    return [_known(item, inner) for item in value] if isinstance(value, list) else value


def finite(value: Any) -> Any:
    """Plain data with null in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def is_torn(line: bytes) -> bool:
    """Whether a crash may have left this of a line of JSON: the beginning of an object, or NULs."""
    return not line.endswith(b"\n") and (line[:1] in (b"", b"{") or not line.strip(b"\0"))
