"""Heads that another program has fine-tuned, under the names of a job's tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import configs
from configs import ConfigError
from model import CLASSIFICATION, TaskHeadConfig, default_model
from trainer.job_tree import is_frozen, with_learners
from trainer.objectives import ObjectiveConfig
from trainer.task_facts import FILE


def with_named_heads(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A job's YAML tree whose frozen teachers have heads by the names of the job's tasks.

    `transformers` stores no task's name. So the only head of a kind is that of the only task of
    this kind, unless a ``task.json`` says which task it is for. Its labels are called as
    ``init.labels`` says. For a task without labels (`TaskConfig.teacher_head`) any head of the kind
    will do, and a teacher without one gets it. Raises ConfigError where there are more labels, or
    fewer, than the head has.
    """
    kinds: dict[str, str] = {}
    weightless: dict[str, TaskHeadConfig] = {}

    def read_tasks(_: str, learner: dict[str, Any]) -> dict[str, Any]:
        objective = _objective_of(learner)
        kinds.update(_kinds_of_tasks(objective))
        tasks = objective.task_terms().values() if objective else ()
        weightless.update(
            {task.head: task.teacher_head for task in tasks if task.teacher_head is not None}
        )
        return learner

    def named(section: str, learner: dict[str, Any]) -> dict[str, Any]:
        absent: Any = {} if weightless else None  # a folder that is not on this machine
        model, init = learner.get("model", absent), learner.get("init")
        if not (is_frozen(learner) and isinstance(model, dict) and isinstance(init, dict)):
            return learner
        heads = model.get("task_heads") or {}
        if not isinstance(heads, dict) or not all(
            isinstance(head, dict) for head in heads.values()
        ):
            return learner
        of_kind = {name: head.get("kind", CLASSIFICATION) for name, head in heads.items()}
        is_ours = (Path(str(init.get("pretrained"))) / FILE).exists()
        tasks = {name: kind for name, kind in kinds.items() if name in weightless or not is_ours}
        names = heads_by_kind(of_kind, tasks)
        heads = {names.get(name, name): head for name, head in heads.items()}
        added = {name: asdict(head) for name, head in weightless.items() if name not in heads}
        heads = {**heads, **added}
        if not weightless.keys().isdisjoint(heads):  # texts have no masks, and need no logits
            model = {**model, "mlm_head": False}
        if isinstance(init.get("labels"), list):
            heads = _with_labels(section, heads, init["labels"])
        return {**learner, "model": {**model, "task_heads": heads}}

    with_learners(tree, read_tasks)
    return with_learners(tree, named)


def heads_by_kind(heads: Mapping[str, str], tasks: Mapping[str, str]) -> dict[str, str]:
    """The name of the task of each head, where a model has one of its kind, and so has the job.

    `heads` and `tasks` are the kinds of a model's heads and of those that the tasks need, by name;
    those in both have their names already.
    """
    free = {name: kind for name, kind in heads.items() if name not in tasks}
    missing = {name: kind for name, kind in tasks.items() if name not in heads}
    return {
        name: task
        for name, kind in free.items()
        for task, wanted in missing.items()
        if wanted == kind and [*free.values()].count(kind) == [*missing.values()].count(kind) == 1
    }


def _objective_of(learner: Mapping[str, Any]) -> ObjectiveConfig | None:
    """A learner's objective; None where the loader is going to refuse it."""
    try:
        return configs.validate(learner.get("objective") or {}, ObjectiveConfig, "")
    except ConfigError:
        return None


def _kinds_of_tasks(objective: ObjectiveConfig | None) -> dict[str, str]:
    """The kind of the head of each task in an objective, by name."""
    try:
        equipped = objective.equip(default_model()).task_heads if objective else {}
    except ValueError:  # a rule of a head, which the loader names
        return {}
    return {name: head.kind for name, head in equipped.items()}


def _with_labels(section: str, heads: Mapping[str, Any], labels: list[Any]) -> dict[str, Any]:
    """The heads with these names for the labels of those that have labels."""
    for head in heads.values():
        if head.get("labels") and len(head["labels"]) != len(labels):
            raise ConfigError(
                f"{section}.init.labels: lists {len(labels)} for the {len(head['labels'])} labels "
                "of the head"
            )
    return {
        name: {**head, "labels": labels} if head.get("labels") else head
        for name, head in heads.items()
    }
