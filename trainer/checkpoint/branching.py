"""Forking: a checkpoint of one run becomes the first checkpoint of another."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.checkpoint.carried import Carried
from trainer.checkpoint.folder import MANIFEST, TRAINER, read_trainer_file, step_name
from trainer.checkpoint.manifest import Manifest, read_manifest
from trainer.checkpoint.reader import Checkpoint
from trainer.checkpoint.storage import StoredFile, copy_durably, write_durably, write_json
from trainer.durable import sync_folder


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
    health = {name: one for name, one in manifest.health.items() if name in learners}
    if not keep_scores:
        trainer |= {"metric": None, "scores": {}}
        for name, one in health.items():
            health[name] = replace(one, evaluated_at=None, held_out=None)
    files = [write_json(new, TRAINER, trainer), *carried.files]
    for file in carried.files:
        _share(file, old, new)
    records = carried.records(first_file=1)
    written = Manifest(step, manifest.world_size, files, records, health, manifest.suspect)
    write_durably(new, MANIFEST, [written.encode()])
    for folder, _, _ in os.walk(target):
        sync_folder(Path(folder))


def _share(file: StoredFile, old: Path, new: Path) -> None:
    (new / file.path).parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(old / file.path, new / file.path)
    except OSError:  # another file system, or one without hard links
        copy_durably(old / file.path, new / file.path)
