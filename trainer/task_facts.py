"""``task.json`` beside an exported model: how its tasks' examples are read and encoded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from configs.typed import nearest_of_all
from data_pipeline import DataError
from model import ModelError
from trainer.objectives.task import TaskConfig

FILE = "task.json"
HEADS = "heads"  # where a model has several: the facts of each
Task = TypeVar("Task", bound=TaskConfig)


@dataclass(frozen=True)
class TaskFacts:
    """What a task's examples look like; the defaults are those of any model of single texts.

    fields: the texts of an example in a table. columns: where the fields stand, by name, unless
    under their own. sequence_length: the longest that was trained on. settings: the task's own.
    scores: the model's on the validation file, such as the threshold for no answer.
    """

    fields: tuple[str, ...] = ("text",)
    columns: Mapping[str, str] = field(default_factory=dict)
    sequence_length: int = 512
    settings: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, head: str) -> TaskFacts:
        """Those of a head of an exported model; the defaults for what another program has made."""
        path = folder / FILE
        if not path.exists():
            return cls()
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            tree = tree[HEADS][head] if HEADS in tree else tree
            return cls(**{**tree, "fields": tuple(tree["fields"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ModelError(f"{path}: cannot be read ({error}); export the model again") from error

    def section(self, kind: type[Task]) -> Task:
        """The task's section as the model was trained with it; the defaults for other models."""
        known = {one.name for one in fields(kind)} & self.settings.keys()
        return kind(**{name: self.settings[name] for name in known})

    def with_columns(self, columns: Mapping[str, str]) -> TaskFacts:
        """The same task with other places for some fields. Raises DataError for unknown fields."""
        for name in columns:
            if name not in self.fields:
                there = nearest_of_all(name, self.fields)
                raise DataError(f"--column {name}: no such field{there}")
        return replace(self, columns={**self.columns, **columns})


def write_facts(folder: Path, facts: Mapping[str, TaskFacts]) -> None:
    """Write the file of an exported model; `facts`: of the task of each head, one or more."""
    trees = {head: asdict(one) for head, one in facts.items()}
    tree = {HEADS: trees} if len(trees) > 1 else next(iter(trees.values()))
    (folder / FILE).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
