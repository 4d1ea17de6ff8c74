"""A job's YAML tree before it is checked, and heads of teachers that another program fine-tuned.

The `tasks` that it names bring their examples and heads, and a learner that names only a folder of
weights (``init.pretrained``) gets the `model` that is there.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import configs
from configs import ConfigError
from configs.kinds import KIND, kinds_of
from configs.typed import convert
from data_pipeline import TaskDataConfig
from model import (
    CLASSIFICATION,
    Ability,
    ModelConfig,
    ModelError,
    TaskHeadConfig,
    default_model,
    read_config,
)
from trainer.objectives import ObjectiveConfig
from trainer.task_facts import FILE

# What a task's own YAML says of its examples; the rest of its data section is about one task.
_DATA = {field.name for field in dataclasses.fields(TaskDataConfig)} - {"path"}
# Keys of heads, which the objective adds again where it trains them.
_HEADS = ("pair_head", "task_heads")


def with_learners(
    tree: Mapping[str, Any], change: Callable[[str, dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """A job's tree with ``change(key, section)`` in place of each learner that has a section."""
    changed = dict(tree)
    if isinstance(tree.get("teacher"), dict):
        changed["teacher"] = change("teacher", tree["teacher"])
    for role in ("teachers", "students"):
        if isinstance(tree.get(role), dict):
            changed[role] = {
                name: change(f"{role}.{name}", learner) if isinstance(learner, dict) else learner
                for name, learner in tree[role].items()
            }
    return changed


def is_frozen(learner: Mapping[str, Any]) -> bool:
    """Whether a learner's section says so; False for a value that the loader is going to refuse."""
    try:
        return convert(learner.get("frozen", False), bool, "frozen")
    except ConfigError:
        return False


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


def with_models(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A job's YAML tree in which learners without a `model` have that of their ``init.pretrained``.

    A null is no model: ``teacher.model=null`` removes that of a file. The model has as many layers
    as ``init.layers`` lists. A learner that is trained gets it without the heads of earlier tasks.
    A folder that does not exist on this machine is skipped; the start of the job reports it. Raises
    ConfigError, naming the key, for a damaged folder.
    """
    return with_learners(tree, _with_model)


def _with_model(section: str, learner: dict[str, Any]) -> dict[str, Any]:
    if learner.get("model", {}) is None:
        learner = {key: value for key, value in learner.items() if key != "model"}
    init = learner.get("init")
    folder = init.get("pretrained") if isinstance(init, dict) else None
    given = learner.get("model", {})
    kind = given.get(KIND, "") if isinstance(given, dict) else ""
    is_open = "model" not in learner or (given == {KIND: kind} and _reads_folders(kind))
    if not isinstance(init, dict) or not isinstance(folder, str) or not is_open:
        return learner
    layers = init.get("layers")
    depth = len(layers) if isinstance(layers, list) else 0
    if not (Path(folder) / "config.json").is_file():
        return {**learner, "model": {"layers": depth}} if depth else learner
    try:
        config = read_config(folder, kind)
    except ModelError as error:
        raise ConfigError(f"{section}.init.pretrained: {error}") from error
    if depth and not config.cannot(Ability.GROW):
        config = config.with_layers(depth)
    left_out = () if is_frozen(learner) else _HEADS
    model = {key: value for key, value in dataclasses.asdict(config).items() if key not in left_out}
    return {**learner, "model": model}


def _reads_folders(kind: object) -> bool:
    """Whether a model section that has only this `kind` is to be read from the folder."""
    kinds = kinds_of(ModelConfig)
    return isinstance(kind, str) and kind in kinds and kinds[kind].reads_folders


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
    for objective in _objectives_in(tree):
        kinds |= _kinds_of_tasks(objective)
        tasks = objective.task_terms().values()
        weightless |= {
            task.head: task.teacher_head for task in tasks if task.teacher_head is not None
        }

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


def _objectives_in(tree: Mapping[str, Any]) -> Iterator[ObjectiveConfig]:
    """The objectives of a job's learners, without those that the loader is going to refuse."""
    several = [_section(tree, role) for role in ("teachers", "students")]
    learners = [_section(tree, "teacher")]
    learners += [_section(role, name) for role in several for name in role]
    for learner in learners:
        with contextlib.suppress(ConfigError):
            yield configs.validate(_section(learner, "objective"), ObjectiveConfig, "")


def _kinds_of_tasks(objective: ObjectiveConfig) -> dict[str, str]:
    """The kind of the head of each task in an objective, by name."""
    try:
        equipped = objective.equip(default_model()).task_heads
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
