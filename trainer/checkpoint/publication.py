"""From copies in memory to a published checkpoint: beside its name, synced, then one rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainer.checkpoint.attempts import Attempt, published
from trainer.checkpoint.carried import Carried
from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.folder import (
    MANIFEST,
    METRICS,
    TRAINER,
    all_steps,
    read_trainer_file,
    remove,
    step_name,
)
from trainer.checkpoint.manifest import LearnerRecord, Manifest, merge_learner, read_manifest
from trainer.checkpoint.ranks import Ranks
from trainer.checkpoint.reader import newest_sound
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.snapshot import Snapshot
from trainer.checkpoint.soundness import (
    Health,
    Portion,
    health,
    measure,
    suspicions,
    with_older_evaluations,
)
from trainer.checkpoint.storage import (
    StoredFile,
    safetensors_chunks,
    safetensors_header,
    write_durably,
    write_json,
)
from trainer.durable import sync_folder

T = TypeVar("T")
_SPARE = 64 * 2**20  # bytes that must remain free: manifest, logs, metrics


@dataclass(frozen=True)
class Unit:
    """All that one save writes: of `learners` what this rank has, of `carried` its share."""

    step: int
    learners: Mapping[str, Snapshot]  # by "teacher", "students/NAME"
    trainer: Mapping[str, Any]  # the content of trainer.json
    carried: Carried = field(default_factory=Carried)  # the same on all ranks
    metrics: Callable[[], bytes] | None = None  # rank 0's, called when they are to be stored
    evaluations: Mapping[str, tuple[int, float]] = field(default_factory=dict)  # step, loss

    @property
    def bytes(self) -> int:
        """What this rank has."""
        return sum(snapshot.data.numel() for snapshot in self.learners.values())


@dataclass(frozen=True)
class Shelf:
    """Where a run's checkpoints stand and the rules for it."""

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


def publish(unit: Unit, shelf: Shelf, ranks: Ranks) -> str:
    """Write a checkpoint and make it visible; collective. Returns, on rank 0, why it is suspect.

    Raises:
        StaleAttempt, CheckpointError: on every rank; nothing was published then.
    """
    staging, first = shelf.staging(unit.step), ranks.rank == 0
    needed = sum(ranks.collect(unit.bytes)) + unit.carried.bytes
    try:
        _together(ranks, shelf, lambda: _begin(unit, shelf, staging, needed) if first else None)
        parts = ranks.collect(_together(ranks, shelf, lambda: _write(unit, staging, ranks)))
        return _together(
            ranks, shelf, lambda: _commit(unit, shelf, staging, parts) if first else ""
        )
    except Exception:
        if first:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _together(ranks: Ranks, shelf: Shelf, action: Callable[[], T]) -> T:
    """Every rank's action, or none. What fails a stale attempt is that the newer one cleared it."""

    def guarded() -> T:
        try:
            return action()
        except OSError:
            shelf.check_attempt()
            raise

    return ranks.agree(guarded)


def _begin(unit: Unit, shelf: Shelf, staging: Path, needed: int) -> None:
    """Rank 0's first act: permission, room, and empty folders."""
    shelf.check_attempt()
    free = shutil.disk_usage(shelf.folder).free
    if free < needed + _SPARE:
        raise CheckpointError(
            f"{shelf.folder}: {free / 1e9:.2f} GB free, the checkpoint needs "
            f"{(needed + _SPARE) / 1e9:.2f} GB; free some space or keep fewer checkpoints"
        )
    shutil.rmtree(staging, ignore_errors=True)  # of a save of this step that failed
    staging.mkdir()
    for name in (*unit.learners, *unit.carried.learners):
        (staging / name).mkdir(parents=True)


@dataclass(frozen=True)
class _Part:
    """What one rank has stored of a learner; `head` is without the data."""

    head: Snapshot
    file: StoredFile
    portion: Portion


def _write(unit: Unit, staging: Path, ranks: Ranks) -> dict[str, _Part]:
    """Write this rank's file of every learner, and copy its share of the carried ones."""
    parts = {}
    for name, snapshot in unit.learners.items():
        header = safetensors_header({f.key: (f.dtype, f.numel) for f in snapshot.fragments})
        path = f"{name}/rank-{ranks.rank:05d}.safetensors"
        stored = write_durably(staging, path, safetensors_chunks(header, snapshot.data))
        parts[name] = _Part(_without_data(snapshot), stored, measure(snapshot))
    unit.carried.copy(staging, ranks.rank, ranks.size)
    return parts


def _commit(unit: Unit, shelf: Shelf, staging: Path, parts: list[dict[str, _Part]]) -> str:
    """Rank 0's last act: manifest, rename, then retention. Returns why it is suspect."""
    trainer = write_json(staging, TRAINER, {**unit.trainer, "attempt": shelf.number})
    files, learners = [trainer], {}
    if unit.metrics is not None:
        files.append(write_durably(staging, METRICS, [unit.metrics()]))
    for name in unit.learners:
        learners[name] = _merge(name, parts, first_file=len(files))
        files += [part[name].file for part in parts]
    learners |= unit.carried.records(first_file=len(files))
    files += unit.carried.files
    healths, suspect = _judge(unit, shelf, parts)
    manifest = Manifest(unit.step, len(parts), files, learners, healths, suspect)
    write_json(staging, MANIFEST, manifest.encode())
    for folder, _, _ in os.walk(staging):
        sync_folder(Path(folder))
    shelf.check_attempt()
    _rename_into_place(staging, shelf.folder / step_name(unit.step), shelf.number)
    _expire(shelf, unit.step)
    return suspect


def _judge(
    unit: Unit, shelf: Shelf, parts: list[dict[str, _Part]]
) -> tuple[dict[str, Health], str]:
    """The health of every learner, and why the checkpoint is suspect, if it is."""
    sound = newest_sound(shelf.folder, before=unit.step)
    before = sound.health if sound else {}
    measured = {
        name: health([part[name].portion for part in parts], unit.evaluations.get(name))
        for name in unit.learners
    }
    now = with_older_evaluations(measured, before)
    carried = {name: before[name] for name in unit.carried.learners if name in before}
    return {**now, **carried}, suspicions(unit.step, now, before)


def _merge(name: str, parts: list[dict[str, _Part]], first_file: int) -> LearnerRecord:
    snapshots = [part[name].head for part in parts]
    return merge_learner(snapshots, range(first_file, first_file + len(parts)))


def _rename_into_place(staging: Path, final: Path, number: int) -> None:
    """One rename. A checkpoint that has the name (resumed from an earlier one) steps aside."""
    aside = final.with_name(f"{final.name}.replaced-{number}")
    if final.exists():
        os.rename(final, aside)
    os.rename(staging, final)
    sync_folder(final.parent)
    if aside.exists():
        remove(aside, number)


def _expire(shelf: Shelf, newest: int) -> None:
    """Delete what need not be kept. Later steps than ours are damaged: they do not count."""
    passed_over = _passed_over(shelf, newest)
    metrics = {
        step: read_trainer_file(shelf.folder, step).get("metric")
        for step in published(shelf.folder)
        if step <= newest and step not in passed_over
    }
    suspect = [step for step in metrics if _is_suspect(shelf.folder / step_name(step))]
    expired = shelf.retention.expired(metrics, shelf.pinned | {newest}, suspect)
    for step in [*passed_over, *expired]:
        shelf.check_attempt()  # a newer one may train on from this checkpoint
        remove(shelf.folder / step_name(step), shelf.number)


def _passed_over(shelf: Shelf, newest: int) -> list[int]:
    """Those between the one that this attempt went on from and its newest that are not its own.

    They were damaged or disowned when it began, or came too late.
    """
    since = max(shelf.pinned, default=newest)
    between = [step for step in all_steps(shelf.folder) if since < step < newest]
    writers = {step: read_trainer_file(shelf.folder, step).get("attempt") for step in between}
    return [step for step in between if writers[step] not in (None, shelf.number)]


def _is_suspect(checkpoint: Path) -> bool:
    """Whether no run should go back to it; nothing of a damaged one is known."""
    try:
        return bool(read_manifest(checkpoint).suspect)
    except CheckpointError:
        return True


def _without_data(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, data=torch.empty(0, dtype=torch.uint8))
