"""The checkpoint folder: names, what is in it, and what an interrupted writer left behind.

``step-000001000`` is a published checkpoint. Beside it, only for a moment or after a crash, and
each marked with the attempt that made it: ``….writing-N`` (unfinished), ``….replaced-N`` (moved
aside while its successor takes the name) and ``….deleted-N`` (being removed).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.strict_json import parse_json

MANIFEST = "manifest.json"
TRAINER = "trainer.json"
METRICS = "metrics.jsonl"  # the newest rows of the run's
_PUBLISHED = re.compile(r"step-(\d{9,})")
_PASSING = re.compile(r"(step-\d{9,})\.(writing|replaced|deleted)-(\d+)")


def step_name(step: int) -> str:
    """The folder name of a published checkpoint."""
    return f"step-{step:09d}"


def all_steps(folder: Path) -> list[int]:
    """Steps of every published checkpoint, oldest first, whoever wrote it."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_dir()]
    steps = [int(match[1]) for name in names if (match := _PUBLISHED.fullmatch(name))]
    return sorted(step for step in steps if step_name(step) in names)


def read_trainer_file(folder: Path, step: int) -> dict[str, Any]:
    """The small file beside the manifest: step, attempt, metric and the trainer's own state.

    Empty where it is missing or not JSON: whoever verifies the checkpoint names the damage.
    """
    try:
        return dict(parse_json((folder / step_name(step) / TRAINER).read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def remove(path: Path, attempt: int) -> None:
    """Delete a folder so that it looks deleted from the first instant on.

    Renaming first also takes the place from under a stale writer that still works inside it.
    """
    grave = path.with_name(f"{path.name.split('.')[0]}.deleted-{attempt}")
    if path != grave:
        shutil.rmtree(grave, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):  # somebody else removed it
            os.rename(path, grave)
    shutil.rmtree(grave, ignore_errors=True)


def tidy(folder: Path, attempt: int) -> None:
    """Clear away what attempts up to this one left unfinished, and undo half a replacement."""
    for path, final, state, owner in list(_passing(folder)):
        if owner > attempt:
            continue
        if state == "replaced" and not final.exists():
            os.rename(path, final)
        else:
            remove(path, attempt)


def _passing(folder: Path) -> Iterator[tuple[Path, Path, str, int]]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if match := _PASSING.fullmatch(path.name):
            yield path, folder / match[1], match[2], int(match[3])
