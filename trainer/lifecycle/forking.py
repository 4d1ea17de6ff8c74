"""`tandem fork`: a new run that begins from a checkpoint of another, with a different config.

A fork may change what its source cannot (see `trainer.lifecycle.continuity`): the data, whose order
then begins at the fork's step, or the shape of a student, which then starts over.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import configs
from configs.durable import atomic_write, fsync
from configs.errors import OptionError
from configs.rules import FolderName
from configs.runs import REVISION
from data_pipeline import DataError, contents, open_corpora
from data_pipeline.shards.locking import unfinished
from trainer.checkpoint.attempts import published
from trainer.checkpoint.carried import branch
from trainer.checkpoint.folder import step_name
from trainer.checkpoint.publication import expired
from trainer.checkpoint.reader import Checkpoint, missing
from trainer.config import JobConfig
from trainer.errors import CheckpointError, TrainingError
from trainer.job_data.examples import tasks_of, with_examples
from trainer.learner_config import DISENTANGLED
from trainer.learner_names import TEACHER
from trainer.learners.state import LearnerState
from trainer.lifecycle.continuity import SHAPE, Change, changes, told
from trainer.run_folder.folder import RunFolder
from trainer.run_folder.metrics import resume


@dataclass(frozen=True)
class Fork:
    """A new run, ready to be trained."""

    folder: RunFolder
    step: int
    changes: list[str]  # changes of the config, one line each
    begin_anew: list[str]  # learners of the checkpoint that start over


def fork(run: RunFolder, step: int, name: str, overrides: Sequence[str] = ()) -> Fork:
    """Create the run `name` beside `run`, from its checkpoint of `step` and that one's config.

    Metrics up to the step are copied, so that curves are complete, and the earlier checkpoints that
    its learners may return to, export or average. The fork has its own run in Weights & Biases.
    ``origin.json`` names the source.

    Raises:
        OptionError: `name` cannot be a folder's.
        TrainingError: the checkpoint does not exist, the new run already exists, `overrides` name
            it otherwise, or the teacher would change its shape.
        DataError: a corpus is missing or of other tokens, or examples are bad.
    """
    rule = FolderName()
    if not rule.allows(name):
        raise OptionError(f"--name: {rule.refusal(name)}")
    if any(word.partition("=")[0] == "name" for word in overrides):
        raise TrainingError("name: set it with --name only")
    steps = published(run.checkpoints)
    if step not in steps:
        raise missing(run.checkpoints, step, steps)
    checkpoint = Checkpoint(run.checkpoints, step)
    with _while_kept(checkpoint.path):
        checkpoint.verify()
    text, source = checkpoint.trainer_state["config"], str(checkpoint.path)
    before = configs.load_text(text, JobConfig, "job", [], source)
    now = configs.load_text(
        text, JobConfig, "job", [configs.assignment("name", name), *overrides], source
    )
    if 0 < now.steps < step:
        raise TrainingError(
            f"steps: must be at least {step}, the step of the fork, not {now.steps}"
        )
    new = RunFolder.of(now)
    if new.path.exists():
        raise TrainingError(f"{new.path}: exists; give the fork another name")
    now = _with_own_examples(before, now, overrides)
    _require_same_tokens(before, now)
    learners = _that_come_along(checkpoint, before, now)
    all_changes = list(changes(before, now))
    new.path.parent.mkdir(parents=True, exist_ok=True)
    with _while_kept(checkpoint.path), unfinished(new.path) as beside:
        _fill(RunFolder(beside), run, step, now, learners, checkpoint.trainer_state, all_changes)
        os.rename(beside, new.path)
    fsync(new.path.parent)
    begin_anew = [learner for learner in checkpoint.learners if learner not in learners]
    return Fork(new, step, told(all_changes, learners), begin_anew)


def _with_own_examples(before: JobConfig, now: JobConfig, overrides: Sequence[str]) -> JobConfig:
    """The fork's config, completed from its examples as at a start.

    Its source has stored in which folders they were. One that no override names gives way where
    the examples are others now.
    """
    if not now.data.has_examples:
        return now
    named = {word.partition("=")[0] for word in overrides}
    had = {(task.path_key, task.data.path) for task in tasks_of(before)}
    kept = {(task.path_key, task.data.path) for task in tasks_of(now)} & had
    return with_examples(now, {key for key, _ in kept} - named)


def _require_same_tokens(before: JobConfig, now: JobConfig) -> None:
    """Raise DataError for a corpus of another tokenizer than the source's, where that exists."""
    try:
        read = next(iter(open_corpora(before.data, urls=False).values()), None)
    except DataError:
        return
    if read is not None:
        for corpus in open_corpora(now.data).values():
            remedy = "a fork keeps its tokenizer; build it with that, or start another run"
            corpus.require_vocabulary(corpus.vocab_size, read.tokenizer_dir, remedy)


@contextlib.contextmanager
def _while_kept(checkpoint: Path) -> Iterator[None]:
    """Raise a CheckpointError that says so where a live run deletes the checkpoint meanwhile."""
    try:
        yield
    except (FileNotFoundError, CheckpointError):
        if checkpoint.exists():
            raise
        raise CheckpointError(
            f"{checkpoint} is gone: the run keeps newer checkpoints only; fork one of them"
        ) from None


def _that_come_along(checkpoint: Checkpoint, before: JobConfig, now: JobConfig) -> list[str]:
    """The learners of a checkpoint that the new config keeps, with the same shape."""
    reshaped = {
        _learner_of(change.key): change.key
        for change in changes(before, now)
        if change.refusal == SHAPE
    }
    for name, learner in now.learners.items():
        # Its table would be added to the embedding of a generator that begins anew.
        if learner.embedding_sharing == DISENTANGLED and learner.generator_name in reshaped:
            reshaped[name] = reshaped[learner.generator_name]
    if TEACHER in reshaped:
        raise TrainingError(
            f"{reshaped[TEACHER]}: a fork keeps its teacher's shape; start another run"
        )
    wanted = now.learners.keys() - reshaped.keys()
    return [name for name in checkpoint.learners if name in wanted]


def _learner_of(key: str) -> str:
    """The learner whose section of a job's config holds this key."""
    section, _, below = key.partition(".")
    return section if section == TEACHER else f"{section}/{below.partition('.')[0]}"


def _fill(
    new: RunFolder,
    run: RunFolder,
    step: int,
    config: JobConfig,
    learners: Sequence[str],
    state: dict[str, Any],
    all_changes: Sequence[Change],
) -> None:
    corpora = contents(config.data)
    changed: dict[str, Any] = {"config": configs.dump(config), "corpora": corpora}
    changed["wandb_id"] = secrets.token_hex(4)
    is_other = _reads_other_data(all_changes, state.get("corpora", {}), corpora)
    if not is_other:
        for earlier in _still_wanted(run, step, config, learners):
            _take_along(run, earlier, new, learners, changed)
    told = _of_learners(state, learners)
    if is_other:
        told |= _without_losses(told["learners"])
    if run.metrics.exists():
        shutil.copyfile(run.metrics, new.metrics)
    rows = resume(new.metrics, step, Checkpoint(run.checkpoints, step).metrics).rows
    state = {**state, **changed, **told, "rows": rows}
    branch(run.checkpoints, step, new.checkpoints, learners, state, keep_scores=not is_other)
    lines = [str(change) for change in all_changes]
    origin = {"run": str(run.path.resolve()), "step": step, "time": time.time(), "changes": lines}
    atomic_write(new.origin, json.dumps(origin, indent=2) + "\n")
    text = f"{REVISION}{run.revision()}\n# forked from {run.path} at step {step}\n"
    atomic_write(new.config, text + changed["config"])


def _still_wanted(
    run: RunFolder, step: int, config: JobConfig, learners: Sequence[str]
) -> list[int]:
    """The steps before `step` whose checkpoints `learners` may return to, export or average."""
    steps = [earlier for earlier in published(run.checkpoints) if earlier <= step]
    rankings = tuple(ranking for ranking in config.rankings if ranking.learner in learners)
    retention = dataclasses.replace(config.retention, last=1, every=None, rankings=rankings)
    return sorted({*steps} - {step, *expired(run.checkpoints, steps, retention, {step})})


def _take_along(
    run: RunFolder, step: int, new: RunFolder, learners: Sequence[str], changed: Mapping[str, Any]
) -> None:
    """Share an earlier checkpoint, unless it is damaged or a live run deletes it meanwhile."""
    try:
        state = Checkpoint(run.checkpoints, step).trainer_state
        state = {**state, **changed, **_of_learners(state, learners)}
        branch(run.checkpoints, step, new.checkpoints, learners, state, keep_scores=True)
    except (FileNotFoundError, CheckpointError):
        shutil.rmtree(new.checkpoints / step_name(step), ignore_errors=True)


def _of_learners(state: Mapping[str, Any], learners: Sequence[str]) -> dict[str, Any]:
    """The parts of a job's state about each learner, of these alone."""
    return {
        part: {name: of for name, of in state.get(part, {}).items() if name in learners}
        for part in ("learners", "held_out")
    }


def _reads_other_data(
    all_changes: Sequence[Change], read: Mapping[str, str], present: Mapping[str, str]
) -> bool:
    """Whether losses of the fork do not compare with those of its source.

    `read` and `present` are the contents of their corpora. A corpus that has only moved is the
    same; `read` is empty in old checkpoints, which leaves the path.
    """
    of_data = [change for change in all_changes if change.key.startswith("data.")]
    refused = any(change.refusal for change in of_data if change.key not in read)
    return refused or (bool(read) and read != present)


def _without_losses(counters: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The parts of a job's state that hold losses, emptied, since they are of other data."""
    learners = {name: LearnerState.from_json(stored) for name, stored in counters.items()}
    for learner in learners.values():
        learner.guard.forget()
        learner.best = None
    emptied = {name: asdict(learner) for name, learner in learners.items()}
    return {"learners": emptied, "teacher_held_out": None, "held_out": {}}
