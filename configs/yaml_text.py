"""Parsing YAML into plain data, safely for any input.

A scalar without quotes stays as it was written (`Plain`). The schema decides whether ``007``,
``1e-4``, ``24:00:00`` or ``no`` is a number, a boolean or a string.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

import yaml

from configs.errors import ConfigError

MAX_DEPTH = 40  # levels of brackets and indentation
MAX_VALUES = 100_000  # an alias counts each time it is used


if TYPE_CHECKING:
    from yaml import SafeLoader as _Base
else:  # libyaml's loader, where PyYAML has it: a tenth of the time
    _Base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Plain(str):
    """A scalar without quotes: a string, a number or a boolean."""

    def __repr__(self) -> str:
        """The scalar as written."""
        return str(self)


class _Loader(_Base):
    """Loads strings, nulls, lists and mappings; refuses other tags and duplicate keys."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - the base class's own kind

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A dict with string keys."""
        keys = [key for key, _ in node.value if key.tag != _MERGE]
        self.flatten_mapping(node)
        seen = set()
        for key in keys:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _NULL:
                raise yaml.YAMLError(f"a key must be a word{_line(key)}")
            if key.value in seen:
                raise yaml.YAMLError(f"{key.value} appears twice{_line(key)}")
            seen.add(key.value)
        return super().construct_mapping(node, deep=True)


def _line(node: yaml.Node) -> str:
    return f", in line {node.start_mark.line + 1}"


def _text(loader: _Loader, node: yaml.ScalarNode) -> str:
    text = loader.construct_scalar(node)
    return str(text) if node.style else Plain(text)


_NULL, _MERGE = "tag:yaml.org,2002:null", "tag:yaml.org,2002:merge"
_Loader.add_implicit_resolver(_NULL, re.compile("^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(_MERGE, re.compile("^<<$"), ["<"])
_Loader.yaml_constructors = {
    _NULL: yaml.SafeLoader.construct_yaml_null,
    "tag:yaml.org,2002:str": _text,
    "tag:yaml.org,2002:seq": yaml.SafeLoader.construct_yaml_seq,
    "tag:yaml.org,2002:map": yaml.SafeLoader.construct_yaml_map,
    None: yaml.SafeLoader.construct_undefined,
}


def parse(text: str, source: str) -> Any:
    """Parse YAML into None, a string, or lists and mappings of these; keys are strings.

    Raises ConfigError, which names the `source`, if the text is not YAML, or is so large or deep
    that it would exhaust the memory or the stack.
    """
    try:
        _require_shallow(text)
        tree = yaml.load(text, _Loader)
        _require_small(tree)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).replace('"<unicode string>", ', "").split())
        if _is_at_tab(text, error):
            problem += "; this is a tab: indent with spaces"
        raise ConfigError(f"{source}: not valid YAML: {problem}") from error
    except UnicodeEncodeError as error:  # a word of the command line in another encoding
        raise ConfigError(f"{source}: is not UTF-8; write it in UTF-8") from error
    return tree


def _is_at_tab(text: str, error: yaml.YAMLError) -> bool:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return False
    line = "".join(text.split("\n")[mark.line : mark.line + 1])  # empty at the end of the text
    return line[mark.column :].startswith("\t")


def has_comment(text: str) -> bool:
    """Whether valid YAML of one line ends in a comment, which `parse` leaves out."""
    node = yaml.compose(text, _Loader)
    return "#" in (text if node is None else text[node.end_mark.index :])


def _require_shallow(text: str) -> None:
    """Raise YAMLError for too many levels, which would exhaust the stack of a loader."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise yaml.YAMLError(f"more than {MAX_DEPTH} levels deep")


def _require_small(tree: Any) -> None:
    """Raise YAMLError for too many values, also if aliases repeat them."""
    pending, count = [tree], 0
    while pending:
        value = pending.pop()
        count += 1
        if count > MAX_VALUES:
            raise yaml.YAMLError(f"more than {MAX_VALUES:,} values, or an alias inside of itself")
        if isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, list):
            pending += value
