"""Tasks that a job names to learn them together: each brings its examples and its head."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import configs
from configs import ConfigError
from data_pipeline import TaskDataConfig
from trainer.job_tree import is_frozen, with_learners

# What a task's own YAML says of its examples; the rest of its data section is about one task.
_DATA = {field.name for field in dataclasses.fields(TaskDataConfig)} - {"path"}


def with_tasks(tree: Mapping[str, Any], schema: Any) -> dict[str, Any]:
    """A job's tree with what each of its ``tasks`` says in data.tasks and objectives instead.

    schema: that of jobs. A learner that is trained gets all of them; what the tree itself says of a
    task stands. Raises ConfigError, naming the key, for what is no task.
    """
    named = tree.get("tasks")
    if not isinstance(named, dict) or not named:
        return dict(tree)
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
        examples[name] = {field: value for field, value in data.items() if field in _DATA}
        kinds[name] = _kind_of(task, key)

    def with_kinds(key: str, learner: dict[str, Any]) -> dict[str, Any]:
        if is_frozen(learner):
            return learner
        return {**learner, "objective": _over(kinds, _section(learner, "objective"))}

    # The teacher has them also where the file says nothing else of it.
    changed = with_learners({**tree, "teacher": _section(tree, "teacher")}, with_kinds)
    return {**changed, "tasks": {}, "data": _over(examples, _section(tree, "data"))}


def _kind_of(task: dict[str, Any], key: str) -> dict[str, Any]:
    """The one section of the objective of a task's job: {"single_sentence": {...}}."""
    objective = _section(_section(task, "teacher"), "objective")
    terms = {name: term for name, term in objective.items() if isinstance(term, dict)}
    if len(terms) != 1:
        raise ConfigError(f"{key}: its teacher.objective must have one term, a task")
    return terms


def _section(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The section at a key; an empty one where there is none."""
    section = tree.get(key)
    return section if isinstance(section, dict) else {}


def _over(tasks: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """A section with these tasks below those that it has."""
    return {**section, "tasks": configs.merge(tasks, _section(section, "tasks"))}
