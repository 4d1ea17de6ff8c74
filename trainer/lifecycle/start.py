"""The start of an attempt at a run: it takes over the folder, and finds where to resume.

All of it comes before text is read or models are built. Stored predictions of a teacher are checked
here: whether they are its, on the batches that the job reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch.distributed as dist

import configs
from configs.durable import atomic_write
from configs.runs import DISTRIBUTION, REVISION
from data_pipeline import Corpus, ExampleSplit, contents, open_corpora
from trainer.checkpoint.attempts import Attempt, Owner, require_no_owner
from trainer.checkpoint.layout import full_state_dict
from trainer.checkpoint.reader import Checkpoint, newest_intact, newest_state
from trainer.config import JobConfig
from trainer.control import forget
from trainer.errors import TrainingError
from trainer.job_data.counting import global_batches
from trainer.job_data.examples import predicts_by_example
from trainer.job_data.fit import require_inputs
from trainer.learners.learner import Learner
from trainer.learners.state import JobState
from trainer.lifecycle import continuity
from trainer.lifecycle.continuity import Change, require_same_stage
from trainer.run_folder.folder import RunFolder
from trainer.stored_logits.format import KEY, Manifest
from trainer.tracking import trackers
from trainer.watch.guard import applied_state, batches_covered, checkpoint_to_resume
from trainer.watch.ranks import on_rank_0

# Besides what an order and a shape depend on: what decides which numbers are stored.
_STORED_KEYS = (
    *("teacher.precision", "teacher.view"),
    *("teacher.stored.top_k", "teacher.stored.precision"),
    *("teacher.stored.samples", "teacher.stored.temperature"),
)


def require_same_order(config: JobConfig, corpora: Mapping[str, Corpus]) -> None:
    """Raise unless the stored predictions that the job reads, if any, cover its batches.

    `corpora` are those of `config`. Raises TrainingError, naming what differs.
    """
    if config.teacher.stored is None:
        return
    folder = Path(config.teacher.stored.path)
    manifest = Manifest.load(folder)
    require_written_for(manifest, config, corpora)
    needed = batches_to_store(config, corpora)
    if manifest.steps < needed:
        raise TrainingError(
            f"{KEY}: {folder}: has {manifest.steps:,} of the {needed:,} batches that the job "
            "reads; `tandem store` with this config writes the others"
        )


def batches_to_store(config: JobConfig, corpora: Mapping[str, Corpus]) -> int:
    """How many batches are stored, from the first on; the first epoch's have every example."""
    covered = batches_covered(config.steps, config.rollback)
    if not predicts_by_example(config):
        return covered
    (corpus,) = corpora.values()
    last = global_batches(config).step_of(ExampleSplit(corpus, "train").total - 1)
    return min(covered, last + 1)


def require_written_for(
    manifest: Manifest, config: JobConfig, corpora: Mapping[str, Corpus]
) -> None:
    """Raise TrainingError where the predictions were written for another order, or otherwise."""
    assert config.teacher.stored is not None
    present = contents(config.data, corpora)
    if difference := next(_differences(manifest, config, present), None):
        raise TrainingError(
            f"{KEY}: {config.teacher.stored.path}: was written for another job: {difference}; "
            "change it back, or name another folder and run `tandem store`"
        )


def require_same_teacher(config: JobConfig, teacher: Learner) -> None:
    """Raise TrainingError unless the stored predictions, if any, are this teacher's. Collective."""
    if config.teacher.stored is None:
        return
    folder, weights = Path(config.teacher.stored.path), fingerprint(teacher)
    on_rank_0(lambda: require_written_by(Manifest.load(folder), weights, folder))


def require_written_by(manifest: Manifest, teacher: str, folder: Path) -> None:
    """Raise TrainingError unless they are of the teacher whose weights have this `fingerprint`."""
    if manifest.teacher != teacher:
        raise TrainingError(
            f"{KEY}: {folder}: holds predictions of other weights than teacher.init.pretrained "
            "has; name the teacher that made them, or another folder"
        )


def fingerprint(learner: Learner) -> str:
    """The SHA-256 of a learner's weights, names and shapes included. Collective."""
    digest = hashlib.sha256()
    for name, tensor in sorted(full_state_dict(learner.engine).items()):
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _differences(manifest: Manifest, now: JobConfig, present: Mapping[str, str]) -> Iterator[str]:
    """Differences that decide the stored numbers; `present` are the contents of the corpora."""
    before = configs.load_text(manifest.job, JobConfig, "job", [], KEY)
    read = manifest.corpora
    same = {key for key, content in read.items() if present.get(key) == content}
    yield from (
        str(change)
        for change in continuity.changes(before, now)
        if _matters(change) and change.key not in same
    )
    if manifest.by_example != predicts_by_example(now):
        kinds = ("of every batch", "of each example once")
        yield f"predictions {kinds[manifest.by_example]} -> {kinds[not manifest.by_example]}"
    if [*read] != [*present]:  # rows are assigned in this order
        yield "data.mixture: its entries, or their order"
    yield from (f"{key}: the corpus there has other content" for key in read.keys() - same)


def _matters(change: Change) -> bool:
    is_model = change.key.startswith("teacher.model.") and change.refusal is not None
    return is_model or change.refusal == continuity.ORDER or change.key in _STORED_KEYS


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartedRun:
    """The config and the attempt, which rank 0 determines at the start for all ranks."""

    config: JobConfig
    attempt: Attempt


def start_run(config: JobConfig, owner: Owner) -> StartedRun:
    """Take over the run folder. On rank 0 only.

    Raises CheckpointError where another job is running in it.
    """
    folder = RunFolder.of(config)
    folder.path.mkdir(parents=True, exist_ok=True)
    attempt = Attempt.begin(folder.path, owner)
    with contextlib.suppress(FileNotFoundError):
        os.utime(folder.config)  # shows `tandem status` that the run is loading, not stalled
    if owner.restart == 0:  # started by a person, which cancels earlier requests
        forget(folder.requests)
    return StartedRun(config, attempt)


def require_startable(config: JobConfig, stores_first: bool) -> None:
    """Raise what would end the run as it starts, if it can be known on this machine.

    With `stores_first`, the predictions that it reads are written before it starts.

    Where corpora are behind URLs, which only the nodes may reach, nothing is compared with them.
    Raises DataError, TrainingError or CheckpointError. May take 30 s.
    """
    require_no_owner(RunFolder.of(config).path)
    corpora = open_corpora(config.data, urls=False)
    if len(corpora) == max(1, len(config.data.mixture) + len(config.data.tasks)):
        changes_since_checkpoint(config, corpora)
        if not stores_first:
            require_same_order(config, corpora)
    elif config.teacher.stored is not None and not stores_first:
        Manifest.load(Path(config.teacher.stored.path))
    require_inputs(config)


def changes_since_checkpoint(config: JobConfig, corpora: Mapping[str, Corpus]) -> list[str]:
    """The changes of the config since the run's newest checkpoint, one line each.

    `corpora` are those of `config`. Raises TrainingError where the run cannot resume with this
    config, or with what its corpora hold now.
    """
    folder = RunFolder.of(config)
    state = newest_state(folder.checkpoints)
    if state is None:
        return []
    before, read = config_of(folder, state, config), state.get("corpora", {})
    present = contents(config.data, corpora)
    begun = state.get("learners", {})
    return continuity.accepted_changes(before, config, read, present, state["step"], begun)


def accept(config: JobConfig) -> None:
    """Write ``config.yaml``, once all checks have passed. On rank 0 only."""
    text = f"{REVISION}{_git_revision()}\n{configs.dump(config)}"
    atomic_write(RunFolder.of(config).config, text)


def config_of(folder: RunFolder, state: Mapping[str, Any], now: JobConfig) -> JobConfig:
    """The config in a checkpoint's state, which is `now` itself where nothing has changed.

    ``config.yaml`` may have been edited or removed.
    """
    if "config" not in state:  # written by an old version
        return folder.load_config()
    if state["config"] == configs.dump(now):
        return now
    return configs.load_text(state["config"], JobConfig, "job", [], str(folder.checkpoints))


def _git_revision() -> str:
    """The git revision of a checkout or a snapshot with a REVISION; else the package's version.

    "none" is for code without any. An installed package may lie inside a user's own checkout.
    """
    root = Path(__file__).parents[2]
    if (root / "REVISION").is_file():
        return (root / "REVISION").read_text(encoding="utf-8").strip()
    if not (root / ".git").exists():
        try:
            return version(DISTRIBUTION)
        except PackageNotFoundError:
            return "none"
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return done.stdout.strip()


@dataclass(frozen=True)
class Resumption:
    """Where a run resumes.

    checkpoint: the checkpoint that it resumes from; None: it starts from step 0.
    newest: the newest intact checkpoint, which a rollback skips.
    """

    config: JobConfig
    checkpoint: Checkpoint | None
    newest: Checkpoint | None

    @classmethod
    def find(cls, config: JobConfig) -> Resumption:
        """Verify the run's checkpoints until one is intact, and follow ``rollback``. Collective.

        Raises TrainingError or CheckpointError where the run cannot roll back as the config says.
        """
        folder = RunFolder.of(config).checkpoints
        newest = newest_intact(folder, _log.warning, dist.group.WORLD)
        resumed = checkpoint_to_resume(newest, config.rollback)
        return cls(config, resumed, newest)

    def require_same_stage(self) -> None:
        """Raise TrainingError where a learner would change its stage. On rank 0 only.

        The checkpoint that counts decides: learners are further on in one that is skipped.
        """
        if self.checkpoint is not None:
            state = self.checkpoint.trainer_state
            before = config_of(RunFolder.of(self.config), state, self.config)
            if before is not self.config:
                require_same_stage(before, self.config, state)

    @property
    def learners(self) -> set[str]:
        """The full names of the learners in the checkpoint."""
        return set(self.checkpoint.learners) if self.checkpoint else set()

    def state(self, corpora: Mapping[str, Corpus]) -> JobState:
        """The job's state at the checkpoint, for a job that now reads these `corpora`."""
        if self.checkpoint is None:
            state = JobState(wandb_id=trackers.first_id(RunFolder.of(self.config).path))
        else:
            state = JobState.from_json(self.checkpoint.trainer_state)
        # A student that was removed, and comes back one day, starts anew.
        state.held_out = {
            n: scores for n, scores in state.held_out.items() if n in self.config.learners
        }
        state.config = configs.dump(self.config)
        state.corpora = contents(self.config.data, corpora)
        state.rolled_back = applied_state(self.config.rollback)
        return state

    def accept(self, attempt: Attempt) -> None:
        """Record where and with which config the run resumes, once all checks have passed.

        On rank 0 only.
        """
        if self.checkpoint is not None and self.checkpoint is not self.newest:
            attempt.disown_after(self.checkpoint.step)
        accept(self.config)

    def lines(self) -> Iterator[str]:
        """Lines for the user: where the run resumes, who is dropped, what is never reached."""
        config = self.config
        if self.checkpoint is not None:
            yield f"resuming from step {self.checkpoint.step:,}"
        if self.checkpoint is not self.newest:
            yield f"the checkpoints after it no longer count: {config.rollback[-1]}"
        for name in sorted(self.learners - config.learners.keys()):
            yield f"{name} is dropped: it is not in the config"
        if late := continuity.unreached_warning(config):
            yield late
        if not config.students:
            of_examples = "fine-tuning" if config.teacher.init.weights else "training"
            what = of_examples if config.data.has_examples else "pre-training"
            yield f"no students: plain {what} of the teacher"
