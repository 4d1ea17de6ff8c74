"""Config keys and metrics that were renamed, so that revisions on both sides can be compared."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Names:
    """Old name -> new name.

    - config: keys, or the last few of a dotted path: ``guard.tolerate``.
    - metrics: parts of the path of a metric, or whole paths: ``students/demo/soft``. Also arrays of
      `tandem data dump` and keys of evaluation.json.
    - tensors: parts of the dotted path of a parameter in checkpoints: ``terms.soft``.

    `defaults` are keys of exported configs that older revisions do not write, with what they mean
    where they are absent.
    """

    config: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Names:
        """The names in a JSON file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def config_key(self, path: str) -> str:
        """The newest name of a key of an exported config."""
        return _renamed(path, self.config, "/")

    def metric(self, path: str) -> str:
        """The newest name of a metric."""
        return _renamed(path, self.metrics, "/")

    def tensor(self, path: str) -> str:
        """The newest name of a parameter."""
        return _renamed(path, self.tensors, ".")

    def spoken(self, override: str, accepts: Callable[[str], bool]) -> str:
        """An override as a revision knows it: the first of its names that the revision accepts."""
        key, _, value = override.partition("=")
        known = {key: None}  # in this order
        for old, new in self.config.items():
            known |= {_replaced(name, new, old, "."): None for name in known}
        names = [f"{name}={value}" for name in known]
        return override if len(names) == 1 else next(filter(accepts, names), override)


def _renamed(path: str, names: Mapping[str, str], separator: str) -> str:
    for old, new in names.items():
        path = _replaced(path, old, new, separator)
    return path


def _replaced(path: str, old: str, new: str, separator: str) -> str:
    mark = re.escape(separator)
    return re.sub(rf"(?:^|(?<={mark})){re.escape(old)}(?={mark}|$)", lambda _: new, path)
