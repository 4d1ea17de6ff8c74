"""Which changes of its config a run can resume with, and what in a config its steps never reach.

Whatever determines the order of the sequences, or the shape of a learner's tensors, must stay the
same; rotary positions have none. Everything else may change, and changes are logged. A corpus may
move, but its content must stay the same. Other lengths of stages must not take a learner back into
a stage that it has left, or past the end of the one that it is in.
"""

import dataclasses
import itertools
import json
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Size

import configs
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.learner_config import DISENTANGLED, LearnerConfig
from trainer.learner_names import section_of
from trainer.learners.module import build_objective

ORDER = "the order of the data would change from here on"
SHAPE = "the learner's checkpoint would not fit"
TOKENS = "the learner would read other tokens from here on"

# What the examples of tasks are made from: the folder of their files, the files and a tokenizer.
FILES = ("root", "train", "validation", "test", "tokenizer")
# The first pattern that a key matches decides: the reason why it must stay, or None if it may
# change. A key that matches none may change. A section that only one of the configs has (such as a
# student that is added, or a term of an objective) counts as a single key.
POLICY: tuple[tuple[str, str | None], ...] = (
    ("data.cache_dir", None),  # affects how shards are fetched, not their content
    ("data.cache_gb", None),
    ("data.stage", None),
    ("data.stage_gb", None),
    ("data.on_bad_shard", None),
    *((f"data.{key}", None) for key in FILES),  # data.path is compared by content
    *((f"data.tasks.*.{key}", None) for key in FILES),
    ("data.*", ORDER),
    ("seed", ORDER),
    ("batch.micro_*", None),
    ("batch.*", ORDER),
    ("*.model.*dropout*", None),  # neither dropout nor initial weights affect a shape
    ("*.model.initializer*", None),
    ("teacher.model.*", SHAPE),
    ("teachers.*.model.*", SHAPE),
    ("students.*.model.*", SHAPE),
    ("*.encoder", SHAPE),
    ("*.embedding_sharing", SHAPE),  # the table that is stored has another meaning
    ("*.freeze_positions", SHAPE),  # what is frozen has no optimizer state
)
ABSENT = "(none)"
TOO_LATE = "; without effect, since the learner has begun"
BRIEF = 200  # characters of a value in a line about a change


@dataclass(frozen=True)
class Change:
    """A key with different values in two configs, and why a run cannot resume with the new one."""

    key: str
    old: object
    new: object
    refusal: str | None

    def __str__(self) -> str:
        return f"{self.key}: {_brief(self.old)} -> {_brief(self.new)}"

    @property
    def assignment(self) -> str:
        """The ``key=value`` that makes this change; null removes a section."""
        return configs.assignment(self.key, None if self.new == ABSENT else self.new)


def accepted_changes(
    before: JobConfig,
    now: JobConfig,
    read: Mapping[str, str],
    present: Mapping[str, str],
    step: int,
    begun: Collection[str] = (),
) -> list[str]:
    """The changes since the checkpoint of `step`, which has the learners in `begun`: see `told`.

    `read` and `present` are the contents (`data_pipeline.contents`) of the corpora that the run has
    read so far and of those that it would read now. `read` lacks corpora that may not have been
    read.

    Raises TrainingError, naming the key, where the run cannot resume with a change. Its message has
    the command that makes all changes in a fork.
    """
    all_changes = [*changes(before, now)]
    same = {key for key, content in read.items() if present.get(key) == content}
    refused = [
        change for change in all_changes if change.refusal and change.key not in same
    ]  # others only moved
    differing = {change.key for change in refused} | (read.keys() & present.keys()) - same
    if folders := _folders_of_examples(now) & differing:
        refused = _with_causes(refused, all_changes, now, folders - read.keys())
    made = [change for change in all_changes if change in refused or change.key not in folders]
    if refused:
        _require_folders_of_models(now, refused)
        way_out = _fork(now, step, made)
        if any(change.refusal == SHAPE and change.key.startswith("teacher.") for change in refused):
            way_out = f"begin another run: name={_free_name(now)} (a fork would keep its teacher)"
        first, old = refused[0], _shown(refused[0].old)
        raise TrainingError(f"{first}: {first.refusal or ORDER}; put {old} back, or {way_out}")
    if read.keys() == present.keys() and [*read] != [*present]:  # rows are assigned in this order
        way_out = _fork(now, step, made)
        raise TrainingError(f"data.mixture: {ORDER}; put its entries back in order, or {way_out}")
    for key in sorted(read.keys() & present.keys() - same):
        raise TrainingError(
            f"{key}: the corpus there is not what the run has read so far; put that back, or "
            f"{_fork(now, step, made)}"
        )
    return told(all_changes, begun)


def told(all_changes: Iterable[Change], begun: Collection[str]) -> list[str]:
    """A line ``key: old -> new`` for each change, which says so where it comes too late.

    A learner that has `begun` keeps its weights and its first step.
    """
    settled = tuple(f"{section_of(name)}.{key}." for name in begun for key in ("init", "start"))
    return [
        f"{change}{TOO_LATE if change.key.startswith(settled) else ''}" for change in all_changes
    ]


def _fork(now: JobConfig, step: int, made: Sequence[Change]) -> str:
    """The advice to fork the run, as a command that makes these changes."""
    run, name = f"{now.output_dir}/{now.name}", _free_name(now)
    words = ["tandem", "fork", run, "--step", str(step), "--name", name]
    command = shlex.join([*words, *(change.assignment for change in made)])
    return f"begin another run from a checkpoint of this one: {command}"


def _free_name(job: JobConfig) -> str:
    """The name of the job with the first number, from 2, that no run in its folder has."""
    names = (f"{job.name}-{number}" for number in itertools.count(2))
    return next(name for name in names if not Path(job.output_dir, name).exists())


def _folders_of_examples(job: JobConfig) -> set[str]:
    """The keys of the folders that hold a job's encoded examples; none where it reads text."""
    data = job.data
    if not data.has_examples:
        return set()
    return {f"data.tasks.{name}.path" for name in data.tasks} or {"data.path"}


def _with_causes(
    refused: Sequence[Change],
    all_changes: Sequence[Change],
    now: JobConfig,
    unknown: Collection[str],
) -> list[Change]:
    """The refused changes of a job whose encoded examples differ, and what made them differ.

    Nobody named the folders that hold them: they follow from files and settings. Without such a
    change, the content of a file differs; then those of `unknown` content are named.
    """
    folders, deciding = _folders_of_examples(now), tuple(_keys_of_examples(now))
    causes = [
        change
        for change in all_changes
        if change.key not in folders
        and (change in refused or f"{change.key}.".startswith(deciding))
    ]
    if all(change.key.endswith(".test") for change in causes):  # nothing is trained on test files
        return [change for change in refused if change.key in unknown]
    return causes


def _keys_of_examples(job: JobConfig) -> Iterator[str]:
    """The beginnings, up to a dot, of keys that may change and decide what the examples are."""
    for section in ("data", *(f"data.tasks.{name}" for name in job.data.tasks)):
        yield from (f"{section}.{key}." for key in FILES)
    for name, learner in job.learners.items():
        if job.data.tokenizer is None:  # the model's folder has it
            yield f"{section_of(name)}.init.pretrained."
        yield f"{section_of(name)}.tokenizer."
        objective = learner.objective
        for term, task in objective.task_terms().items():
            keys = (option.name for option in dataclasses.fields(task))
            encoded = (key for key in keys if key not in task.not_encoded)
            section = f"{section_of(name)}.objective.{objective.key_of(term)}"
            yield from (f"{section}.{key}." for key in encoded)


def _require_folders_of_models(now: JobConfig, refused: Sequence[Change]) -> None:
    """Raise TrainingError where a refused model is the default, since its folder is gone."""
    for name, learner in now.learners.items():
        folder, section = learner.init.pretrained, section_of(name)
        has_other_model = any(change.key.startswith(f"{section}.model.") for change in refused)
        if has_other_model and folder is not None and not Path(folder).is_dir():
            raise TrainingError(
                f"{section}.init.pretrained: {folder}: no such folder; put it back, or resume with "
                f"{now.output_dir}/{now.name}/config.yaml, which has the model"
            )


def changes(before: JobConfig, now: JobConfig) -> Iterator[Change]:
    """Every key with different values, in the order of the schema."""
    reshaped = [f"students.{name}.objective.*" for name in _reshaped_objectives(before, now)]
    reshaped += [f"{section_of(name)}.generator" for name in _sharing(before) & _sharing(now)]
    policy = (*_free(before, now), *POLICY, *((pattern, SHAPE) for pattern in reshaped))
    if not now.data.has_examples:  # of a task's examples the content is compared
        policy = ("*s.*.tokenizer", TOKENS), *policy
    for key, old, new in _differences("", _plain(before), _plain(now)):
        refusal = next((reason for pattern, reason in policy if fnmatchcase(key, pattern)), None)
        yield Change(key, old, new, refusal)


def _free(before: JobConfig, now: JobConfig) -> Iterator[tuple[str, None]]:
    """The keys of models on which no shape depends, where it does not in either config."""
    in_both = before.learners.keys() & now.learners.keys()
    for name in in_both:
        old, new = before.learners[name].model, now.learners[name].model
        for key in {*old.free_keys} & {*new.free_keys}:
            yield f"{section_of(name)}.model.{key}", None


def _sharing(job: JobConfig) -> set[str]:
    """The learners with a table that is added to the word embedding of their generator."""
    learners = job.learners.items()
    return {name for name, learner in learners if learner.embedding_sharing == DISENTANGLED}


def _plain(job: JobConfig) -> dict[str, Any]:
    """The config as plain data; models as they are built, with the heads that an objective adds."""
    tree = dataclasses.asdict(job)
    tree["teacher"]["model"] = dataclasses.asdict(job.teacher.architecture)
    for role, named in (("teachers", job.teachers), ("students", job.students)):
        for name, learner in named.items():
            tree[role][name]["model"] = dataclasses.asdict(learner.architecture)
    return tree


def _reshaped_objectives(before: JobConfig, now: JobConfig) -> Iterator[str]:
    """Students in both configs whose terms now have different learnable parts (projections)."""
    for name in before.students.keys() & now.students.keys():
        old, new = before.students[name], now.students[name]
        differs = old.objective != new.objective and old.architecture == new.architecture
        if differs and _learnable(old, before) != _learnable(new, now):
            yield name


def _learnable(student: LearnerConfig, job: JobConfig) -> dict[str, Size]:
    told = student.in_steps(1)  # the parts are the same whatever the length of a stage
    objective = build_objective(told, job.teacher.model, 0, job.other_models)
    return {name: parameter.shape for name, parameter in objective.named_parameters()}


def _differences(prefix: str, old: Any, new: Any) -> Iterator[tuple[str, object, object]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            pair = old.get(key, ABSENT), new.get(key, ABSENT)
            yield from _differences(f"{prefix}.{key}" if prefix else key, *pair)
    elif old != new:
        yield prefix, old, new


def _shown(value: object) -> object:
    """A value for a message, as the command line accepts it; a section as one line."""
    if value is None or value == "" or isinstance(value, bool):
        return json.dumps(value)
    if not isinstance(value, Mapping):
        return value
    return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) + "}"


def _brief(value: object) -> str:
    """A value as in `_shown`, of which a long one, such as a whole student, is cut."""
    text = str(_shown(value))
    return text if len(text) <= BRIEF else f"{text[:BRIEF]} [...]"


def require_same_stage(before: JobConfig, now: JobConfig, state: Mapping[str, Any]) -> None:
    """Raise TrainingError where a learner would go back into a stage, or skip its end.

    At the end the next stage begins, with fresh moments or the best weights. `steps` change the
    length of a stage that is a fraction of them. `state` is that of the checkpoint, which was made
    with the config `before`.
    """
    old, new = before.in_steps, now.in_steps
    for name, counters in state.get("learners", {}).items():
        is_named = name in old.learners and name in new.learners
        if not is_named or counters["finished_at"] is not None:
            continue
        made = state["step"] - counters["started_at"]
        were, will_be = (job.learners[name].stages.starts for job in (old, new))
        for first, then in zip(reversed(were), reversed(will_be), strict=False):
            if made and first <= made < then:
                why = "begin again"
            elif 0 < then < made <= first:
                why = "be over"
            else:
                continue
            (key,) = new.learners[name].transfers
            raise TrainingError(
                f"{section_of(name)}.{key}: would {why} after {made} steps, with {then} steps in "
                f"place of {first}; put the old value back (if it is a fraction of steps that you "
                f"have changed, set {section_of(name)}.{key}.steps={first}, and fraction to null)"
            )


def unreached_warning(config: JobConfig) -> str:
    """One line that names everything scheduled after the last step; empty if there is nothing.

    Such events are normal in the config of a short trial run.
    """
    events = list(_unreached(config)) if config.steps else []  # not known before it is prepared
    if not events:
        return ""
    return f"steps: {config.steps} end before {', '.join(events)}; fine for a trial run"


def _unreached(config: JobConfig) -> Iterator[str]:
    steps = config.steps
    for name, learner in config.in_steps.learners.items():
        section = section_of(name)
        if learner.schedule.warmup_steps >= _steps_of(learner, steps):
            yield f"{section}.schedule.warmup_steps ({learner.schedule.warmup_steps})"
        for key, section_of_stages in learner.transfers.items():
            first = section_of_stages.build(learner.model.layers).last_begins
            if first >= _steps_of(learner, steps):
                yield f"the end of {section}.{key} ({first})"
        if learner.start.step >= steps:
            yield f"{section}.start.step ({learner.start.step})"
    for key, starts in {
        "batch.growth": [entry.step for entry in config.batch.growth],
        "data.phases": [entry.from_step for entry in config.data.phases],
        "teacher.stacking.steps": config.teacher.stacking.steps,
        "profile.steps": list(config.profile.span or ())[:1],
    }.items():
        late = [step for step in starts if step >= steps]
        if late:
            yield f"{key} ({late[0]})"


def _steps_of(learner: LearnerConfig, steps: int) -> int:
    return min(learner.budget.steps or steps, steps)
