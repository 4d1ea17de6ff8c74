"""Tasks that a job names to learn them together: each brings its examples and its head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import configs
from configs import ConfigError
from data_pipeline import TaskDataConfig
from trainer.job_tree import is_frozen, learners_of

# What a task's own YAML says of its examples; the rest of its data section is about one task.
_DATA = {field.name for field in dataclasses.fields(TaskDataConfig)} - {"path"}


def fill_in_tasks(tree: dict[str, Any], schema: Any) -> None:
    """Write what each of the job's ``tasks`` says into data.tasks and objectives, for `tasks`.

    `tree` is a job's, and `schema` that of jobs. A learner that is trained gets all of them; what
    the tree itself says of a task stands. Raises ConfigError, naming the key, for what is no task.
    """
    named = tree.get("tasks")
    if not isinstance(named, dict) or not named:
        return
    examples, kinds = {}, {}
    for name, source in named.items():
        key = f"tasks.{name}"
        if not isinstance(source, str):
            raise ConfigError(f"{key}: must be a name of configs/task, or a file")
        try:
            task = configs.load_tree(source, schema, "task")
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error
        data = _section(task, "data")
        examples[name] = {one: value for one, value in data.items() if one in _DATA}
        kinds[name] = _kind_of(task, key)
    _add(_section(tree, "data"), "tasks", examples)
    _section(tree, "teacher")  # has them also where the file says nothing else of it
    for _, learner in learners_of(tree):
        if not is_frozen(learner):
            _add(_section(learner, "objective"), "tasks", kinds)
    tree["tasks"] = {}


def _kind_of(task: dict[str, Any], key: str) -> dict[str, Any]:
    """The one section of the objective of a task's job: {"single_sentence": {...}}."""
    objective = _section(_section(task, "teacher"), "objective")
    found = {name: one for name, one in objective.items() if isinstance(one, dict)}
    if len(found) != 1:
        raise ConfigError(f"{key}: its teacher.objective must have one term, a task")
    return found


def _section(tree: dict[str, Any], key: str) -> dict[str, Any]:
    """The section at a key, which is made where there is none."""
    if not isinstance(tree.get(key), dict):
        tree[key] = {}
    found: dict[str, Any] = tree[key]
    return found


def _add(tree: dict[str, Any], key: str, below: Mapping[str, Any]) -> None:
    """Put `below` under what a key has already."""
    tree[key] = configs.merge(below, _section(tree, key))
