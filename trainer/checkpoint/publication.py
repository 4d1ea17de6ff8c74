"""Publishing a checkpoint: write it beside its final name, fsync it, then rename it once.

Every step of it succeeds on all ranks, or fails on all.
"""

import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from configs.durable import fsync, while_unchanged
from trainer.checkpoint.attempts import Attempt, published
from trainer.checkpoint.carried import Carried
from trainer.checkpoint.folder import (
    MANIFEST,
    METRICS,
    TRAINER,
    Retention,
    StoredFile,
    all_steps,
    remove,
    safetensors_chunks,
    safetensors_header,
    scores_by_step,
    step_name,
    write_durably,
    write_json,
    writer_of,
)
from trainer.checkpoint.manifest import Manifest, digest, merge_learner, read_manifest
from trainer.checkpoint.reader import newest_sound
from trainer.checkpoint.snapshot import (
    Fragment,
    Health,
    Portion,
    Snapshot,
    health,
    measure,
    suspicions,
)
from trainer.device import background_group
from trainer.errors import CheckpointError, StaleAttempt

T = TypeVar("T")
_UNSEEN_SECONDS, _RETRY_SECONDS = 90.0, 0.5
_RESERVE = 64 * 2**20  # bytes that must remain free: manifest, logs, metrics


class Ranks:
    """All ranks, over the gloo group beside that of training. Creating it is collective."""

    def __init__(self) -> None:
        self.group = background_group()
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def agree(self, action: Callable[[], T]) -> T:
        """Run ``action`` on every rank and return this rank's result; collective.

        Raises:
            StaleAttempt: on every rank, if any rank's action raised it.
            CheckpointError: on every rank, if any rank's action failed; says where and why.
        """
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:
            failure = _portable(error, self.rank)
        failures: list[Exception | None] = [None] * self.size
        dist.all_gather_object(failures, failure, group=self.group)
        raised = [error for error in failures if error is not None]
        if raised:
            raise min(raised, key=lambda error: not isinstance(error, StaleAttempt))
        return result

    def collect(self, value: T) -> list[T]:
        """Every rank's value on rank 0; an empty list elsewhere; collective."""
        values: list[T] | None = [value] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values or []


def _portable(error: Exception, rank: int) -> Exception:
    """The error in a form that can be pickled, with a one-line message that names the rank."""
    if isinstance(error, StaleAttempt):
        return StaleAttempt(str(error))
    if isinstance(error, OSError):
        return CheckpointError(f"{error.filename or 'checkpoint'}: {error.strerror} (rank {rank})")
    if isinstance(error, CheckpointError):
        return CheckpointError(str(error))
    return CheckpointError(f"{type(error).__name__}: {error} (rank {rank})")


@dataclass(frozen=True)
class Save:
    """The content of one save on this rank."""

    step: int
    learners: Mapping[str, Snapshot]  # by "teacher", "students/NAME"
    trainer: Mapping[str, Any]  # the content of trainer.json
    carried: Carried = field(default_factory=Carried)  # the same on all ranks; each copies a share
    metrics: Callable[[], bytes] | None = None  # on rank 0; called when they are stored
    evaluations: Mapping[str, tuple[int, float]] = field(default_factory=dict)  # step, loss

    @property
    def bytes(self) -> int:
        """Bytes that this rank writes, without `carried`."""
        return sum(snapshot.data.numel() for snapshot in self.learners.values())


@dataclass(frozen=True)
class Store:
    """A run's checkpoint folder, and the rules for it."""

    folder: Path
    retention: Retention
    attempt: Attempt | None
    pinned: frozenset[int]  # steps that are never deleted

    @property
    def number(self) -> int:
        """This attempt's number; 0 in a run without attempts."""
        return self.attempt.number if self.attempt else 0

    def check_attempt(self) -> None:
        """Raises StaleAttempt once a newer attempt has begun."""
        if self.attempt:
            self.attempt.check()

    def staging(self, step: int) -> Path:
        """The folder in which this attempt prepares a checkpoint."""
        return self.folder / f"{step_name(step)}.writing-{self.number}"


def publish(save: Save, store: Store, ranks: Ranks) -> str:
    """Write a checkpoint and make it visible; collective. Returns, on rank 0, why it is suspect.

    Raises:
        StaleAttempt, CheckpointError: on every rank; nothing has been published.
    """
    staging, first = store.staging(save.step), ranks.rank == 0
    needed = sum(ranks.collect(save.bytes)) + save.carried.bytes
    try:
        _together(ranks, store, lambda: _begin(save, store, staging, needed) if first else None)
        parts = ranks.collect(_together(ranks, store, lambda: _write(save, staging, ranks)))
        return _together(
            ranks, store, lambda: _commit(save, store, staging, parts) if first else ""
        )
    except Exception:
        if first:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _together(ranks: Ranks, store: Store, action: Callable[[], T]) -> T:
    """Run `action` on every rank; if one fails, all fail. A stale attempt raises StaleAttempt.

    A newer attempt removes the staging folder of a stale one, whose writes then fail.
    """

    def guarded() -> T:
        try:
            return action()
        except OSError:
            store.check_attempt()
            raise

    return ranks.agree(guarded)


def _begin(save: Save, store: Store, staging: Path, needed: int) -> None:
    """On rank 0, first: check the attempt and the free space, and make empty folders."""
    store.check_attempt()
    free = shutil.disk_usage(store.folder).free
    if free < needed + _RESERVE:
        raise CheckpointError(
            f"{store.folder}: {free / 1e9:.2f} GB free, the checkpoint needs "
            f"{(needed + _RESERVE) / 1e9:.2f} GB; free some space or keep fewer checkpoints"
        )
    shutil.rmtree(staging, ignore_errors=True)  # of a save of this step that failed
    staging.mkdir()
    for name in (*save.learners, *save.carried.learners):
        (staging / name).mkdir(parents=True)


@dataclass(frozen=True)
class _Part:
    """The facts about a rank's part of a learner that rank 0 needs for the manifest."""

    fragments: list[Fragment]
    digest: str  # of the rank's tensors
    file: StoredFile
    portion: Portion


def _write(save: Save, staging: Path, ranks: Ranks) -> dict[str, _Part]:
    """Write this rank's file of every learner, and copy its share of the carried learners."""
    parts = {}
    for name in (*save.learners, *save.carried.learners):
        _enter(staging / name)
    for name, snapshot in save.learners.items():
        header = safetensors_header({f.key: (f.dtype, f.numel) for f in snapshot.fragments})
        path = f"{name}/rank-{ranks.rank:05d}.safetensors"
        stored = write_durably(staging, path, safetensors_chunks(header, snapshot.data))
        parts[name] = _Part(snapshot.fragments, digest(snapshot), stored, measure(snapshot))
    save.carried.copy(staging, ranks.rank, ranks.size)
    return parts


def _enter(folder: Path) -> None:
    """Wait until this node sees a folder that rank 0 has made, or make it.

    NFS may answer for a minute that what was just made is not there, or that it exists and is none.
    """
    end = time.monotonic() + _UNSEEN_SECONDS
    while True:
        try:
            return folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, FileNotFoundError):
            if time.monotonic() > end:
                raise
            time.sleep(_RETRY_SECONDS)


def _commit(save: Save, store: Store, staging: Path, parts: list[dict[str, _Part]]) -> str:
    """On rank 0, last: manifest, rename, then retention. Returns why the checkpoint is suspect."""
    trainer = write_json(staging, TRAINER, {**save.trainer, "attempt": store.number})
    files, learners = [trainer], {}
    if save.metrics is not None:
        files.append(write_durably(staging, METRICS, [save.metrics()]))
    for name in save.learners:
        written = [(part[name].fragments, part[name].digest) for part in parts]
        numbers = range(len(files), len(files) + len(parts))
        learners[name] = merge_learner(save.learners[name], written, numbers)
        files += [part[name].file for part in parts]
    learners |= save.carried.records(first_file=len(files))
    files += save.carried.files
    healths, suspect = _judge(save, store, parts)
    manifest = Manifest(save.step, len(parts), files, learners, healths, suspect)
    write_durably(staging, MANIFEST, [manifest.encode()])
    for folder, _, _ in os.walk(staging):
        fsync(Path(folder))
    store.check_attempt()
    _rename_into_place(staging, store.folder / step_name(save.step), store.number)
    _expire(store, save.step)
    return suspect


def _judge(
    save: Save, store: Store, parts: list[dict[str, _Part]]
) -> tuple[dict[str, Health], str]:
    """The health of every learner, and why the checkpoint is suspect, if it is."""
    sound = newest_sound(store.folder, before=save.step)
    before = sound.health if sound else {}
    now = {
        name: health([part[name].portion for part in parts], save.evaluations.get(name))
        for name in save.learners
    }
    return {**now, **save.carried.health}, suspicions(save.step, now, before)


def _rename_into_place(staging: Path, final: Path, number: int) -> None:
    """Publish by one rename. A checkpoint that already has the name is moved aside first."""
    aside = final.with_name(f"{final.name}.replaced-{number}")
    if final.exists():
        os.rename(final, aside)
    os.rename(staging, final)
    fsync(final.parent)
    if aside.exists():
        remove(aside, number)


def _expire(store: Store, newest: int) -> None:
    """Delete the checkpoints that the retention does not keep. Steps after `newest` are damaged."""
    superseded = _superseded(store, newest)
    steps = [n for n in published(store.folder) if n <= newest and n not in superseded]
    kept = store.pinned | {newest}
    for step in [*superseded, *expired(store.folder, steps, store.retention, kept)]:
        store.check_attempt()  # a newer attempt may have resumed from this checkpoint
        remove(store.folder / step_name(step), store.number)


def expired(
    folder: Path, steps: Sequence[int], retention: Retention, pinned: Collection[int]
) -> list[int]:
    """The ones of these ascending steps whose checkpoints the `retention` does not keep."""
    scores = scores_by_step(folder, steps)
    suspect = [step for step in scores if _is_suspect(folder / step_name(step))]
    return retention.expired(scores, pinned, suspect)


def _superseded(store: Store, newest: int) -> list[int]:
    """Other attempts' checkpoints between the one that this attempt resumed from and `newest`.

    They were damaged or disowned when this attempt began, or published after that.
    """
    since = max(store.pinned, default=newest)
    between = [step for step in all_steps(store.folder) if since < step < newest]
    writers = {step: writer_of(store.folder, step) for step in between}
    return [step for step in between if writers[step] not in (None, store.number)]


def _is_suspect(checkpoint: Path) -> bool:
    """Whether no run should roll back to a checkpoint; a damaged one counts as suspect."""
    try:
        return _says_suspect(checkpoint / MANIFEST)
    except (OSError, CheckpointError):
        return True


@while_unchanged  # it takes long to read at thousands of ranks, and every save asks about all
def _says_suspect(manifest: Path) -> bool:
    return bool(read_manifest(manifest.parent).suspect)
