"""The checkpoint folder: names, contents, and leftovers of an interrupted writer.

``step-000001000`` is a published checkpoint. Other names exist only for a moment or after a crash;
N is the attempt that made them: ``….writing-N`` (unfinished), ``….replaced-N`` (moved aside while
its successor takes the name) and ``….deleted-N`` (being removed).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.strict_json import from_json, read_json

MANIFEST = "manifest.json"
TRAINER = "trainer.json"
METRICS = "metrics.jsonl"  # the newest rows of the run's metrics
_PUBLISHED = re.compile(r"step-(\d{9,})")
_TEMPORARY = re.compile(r"(step-\d{9,})\.(writing|replaced|deleted)-(\d+)")


def step_name(step: int) -> str:
    """The folder name of a published checkpoint."""
    return f"step-{step:09d}"


def all_steps(folder: Path) -> list[int]:
    """Steps of every published checkpoint, oldest first, valid or not."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir()]
    steps = [int(match[1]) for name in names if (match := _PUBLISHED.fullmatch(name))]
    return sorted(step for step in steps if step_name(step) in names)


@dataclass(frozen=True)
class _Score:
    metric: str | None = None
    value: float | None = None


@dataclass(frozen=True)
class _TrainerFile:
    """The values of ``trainer.json`` that are read before its checksum is verified."""

    attempt: int | None = None
    scores: dict[str, _Score] = field(default_factory=dict)
    metric: float | None = None  # of old checkpoints, which have no scores
    metric_name: str | None = None


def read_trainer_file(folder: Path, step: int) -> dict[str, Any]:
    """``trainer.json``: step, attempt, the learners' scores and the trainer's own state.

    Empty if it is missing or damaged: the verification of the checkpoint reports the damage.
    """
    path = folder / step_name(step) / TRAINER
    try:
        tree = read_json(path)
        from_json(tree, _TrainerFile, path)
    except (OSError, ConfigError):
        return {}
    return dict(tree)


def scores_of(folder: Path, step: int) -> dict[str, Any]:
    """The learners' scores that a checkpoint stores, each with its metric; see `Ranking`.

    Old checkpoints have one score: the teacher's.
    """
    trainer = read_trainer_file(folder, step)
    if trainer.get("metric") is None:
        scores = from_json(trainer, _TrainerFile, TRAINER).scores
        return {name: dataclasses.asdict(score) for name, score in scores.items()}
    return {"teacher": {"metric": trainer.get("metric_name"), "value": trainer["metric"]}}


def remove(path: Path, attempt: int) -> None:
    """Delete a folder, by a rename first: it disappears in one step.

    The rename also removes the path that a stale writer may still be writing to.
    """
    trash = path.with_name(f"{path.name.split('.')[0]}.deleted-{attempt}")
    if path != trash:
        shutil.rmtree(trash, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):  # another process removed it
            os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def tidy(folder: Path, attempt: int) -> None:
    """Remove what attempts up to this one left unfinished, and undo an interrupted replacement."""
    for path, final, state, owner in list(_temporary(folder)):
        if owner > attempt:
            continue
        if state == "replaced" and not final.exists():
            os.rename(path, final)
        else:
            remove(path, attempt)


def _temporary(folder: Path) -> Iterator[tuple[Path, Path, str, int]]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if match := _TEMPORARY.fullmatch(path.name):
            yield path, folder / match[1], match[2], int(match[3])
