"""Reading a job's YAML tree before it is checked: plain sections, with scalars as written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from configs import ConfigError
from configs.typed import convert


def learners_of(tree: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each learner that has a section, with the section's full key: the teachers first."""
    found = [("teacher", tree.get("teacher"))]
    for role in ("teachers", "students"):
        named = tree.get(role)
        items = named.items() if isinstance(named, dict) else ()
        found += [(f"{role}.{name}", one) for name, one in items]
    yield from ((section, one) for section, one in found if isinstance(one, dict))


def is_frozen(learner: Mapping[str, Any]) -> bool:
    """Whether a learner's section says so; False for a value that the loader is going to refuse."""
    try:
        frozen: bool = convert(learner.get("frozen", False), bool, "frozen")
    except ConfigError:
        return False
    return frozen
