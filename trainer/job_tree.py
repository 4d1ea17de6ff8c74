"""Reading a job's YAML tree before it is checked: plain sections, with scalars as written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from configs import ConfigError
from configs.typed import convert


def with_learners(
    tree: Mapping[str, Any], change: Callable[[str, dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """A job's tree with ``change(key, section)`` in place of each learner that has a section."""
    changed = dict(tree)
    for role in ("teacher", "teachers", "students"):
        section = tree.get(role)
        if not isinstance(section, dict):
            continue
        changed[role] = (
            change(role, section)
            if role == "teacher"
            else {
                name: change(f"{role}.{name}", learner) if isinstance(learner, dict) else learner
                for name, learner in section.items()
            }
        )
    return changed


def is_frozen(learner: Mapping[str, Any]) -> bool:
    """Whether a learner's section says so; False for a value that the loader is going to refuse."""
    try:
        frozen: bool = convert(learner.get("frozen", False), bool, "frozen")
    except ConfigError:
        return False
    return frozen
