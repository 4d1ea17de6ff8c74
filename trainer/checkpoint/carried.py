"""Copying learners' files from one checkpoint to another, without loading them.

The next checkpoint takes a finished learner so, and the first checkpoint of a fork all learners.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from configs.durable import fsync
from trainer.checkpoint.folder import (
    MANIFEST,
    TRAINER,
    StoredFile,
    copy_durably,
    read_trainer_file,
    step_name,
    write_durably,
    write_json,
)
from trainer.checkpoint.manifest import (
    LearnerRecord,
    Manifest,
    TensorRecord,
    check_file,
    read_manifest,
)
from trainer.checkpoint.reader import Checkpoint
from trainer.checkpoint.snapshot import Health
from trainer.errors import CheckpointError


@dataclass(frozen=True)
class Carried:
    """Learners of an earlier checkpoint. Copied, not linked: damage affects one checkpoint only."""

    source: Path = Path()
    files: list[StoredFile] = field(default_factory=list)
    learners: Mapping[str, LearnerRecord] = field(default_factory=dict)  # indices into `files`
    health: Mapping[str, Health] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint, names: Collection[str]) -> Carried:
        """The learners `names` of `checkpoint`, which must have them."""
        learners: dict[str, LearnerRecord] = {}
        files: list[StoredFile] = []
        for name in names:
            record, stored = checkpoint.stored(name)
            places = {old: len(files) + new for new, old in enumerate(stored)}
            learners[name] = _renumbered(record, places)
            files += stored.values()
        health = {name: learner for name, learner in checkpoint.health.items() if name in learners}
        return cls(checkpoint.path, files, learners, health)

    @property
    def bytes(self) -> int:
        """Bytes that all ranks copy together."""
        return sum(file.bytes for file in self.files)

    def copy(self, folder: Path, rank: int, ranks: int) -> None:
        """Copy this rank's share into the checkpoint in `folder`, durably, and verify it.

        Raises:
            CheckpointError: a file does not match its checksum; names it.
        """
        for file in self.files[rank::ranks]:
            copy_durably(self.source / file.path, folder / file.path)
            try:
                check_file(folder, file)
            except CheckpointError:
                check_file(self.source, file)  # names the source, where the damage is there
                raise

    def records(self, first_file: int) -> dict[str, LearnerRecord]:
        """The learners' records when `files` start at index `first_file` of the manifest."""
        places = {number: first_file + number for number in range(len(self.files))}
        return {name: _renumbered(record, places) for name, record in self.learners.items()}


def _renumbered(record: LearnerRecord, places: Mapping[int, int]) -> LearnerRecord:
    """The record with the file indices that `places` gives for the old ones."""

    def moved(tensor: TensorRecord) -> TensorRecord:
        cuts = [(start, numel, places[file]) for start, numel, file in tensor.fragments]
        return replace(tensor, fragments=cuts)

    return replace(record, tensors={name: moved(tensor) for name, tensor in record.tensors.items()})


def branch(
    source: Path,
    step: int,
    target: Path,
    learners: Collection[str],
    state: Mapping[str, Any],
    *,
    keep_scores: bool,
) -> None:
    """Write the checkpoint ``source/step-…`` into ``target``, a new folder, with another state.

    Tensors are shared by hard links where the file system allows it, else copied.

    Args:
        source: ``RUN/checkpoints`` of the run to branch from.
        step: the checkpoint's step; the caller has verified it.
        target: ``RUN/checkpoints`` of the new run.
        learners: the learners to take from the checkpoint.
        state: the trainer's own state for the new ``trainer.json``.
        keep_scores: whether its held-out scores compare with later ones in the new run.
    """
    old, new = source / step_name(step), target / step_name(step)
    manifest = read_manifest(old)
    carried = Carried.of(Checkpoint(source, step), [n for n in manifest.learners if n in learners])
    new.mkdir(parents=True)
    trainer = {**read_trainer_file(source, step), "state": state, "attempt": 0}
    health = {**carried.health}
    if not keep_scores:
        trainer |= {"metric": None, "scores": {}}
        for name, learner in health.items():
            health[name] = replace(learner, evaluated_at=None, held_out=None)
    files = [write_json(new, TRAINER, trainer), *carried.files]
    for file in carried.files:
        _share(file, old, new)
    records = carried.records(first_file=1)
    written = Manifest(step, manifest.world_size, files, records, health, manifest.suspect)
    write_durably(new, MANIFEST, [written.encode()])
    for folder, _, _ in os.walk(target):
        fsync(Path(folder))


def _share(file: StoredFile, old: Path, new: Path) -> None:
    (new / file.path).parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(old / file.path, new / file.path)
    except OSError:  # another file system, or one without hard links
        copy_durably(old / file.path, new / file.path)
