"""Fencing: each incarnation of a run has a number, and an older one can change nothing any more.

A node that is cut off from the scheduler keeps running for a while beside the requeued copy of its
job. Every incarnation therefore takes the next number by *exclusive creation* of
``RUN/attempts/000002.json`` before it looks for a checkpoint, and writes there which checkpoints it
found. Whatever an older attempt publishes after that is in nobody's list, and readers ignore it.

The same record says who owns the run (see `Owner`): a second job, started by mistake, is refused as
long as the first one lives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.strict_json import parse_json
from trainer.checkpoint.errors import CheckpointError, StaleAttempt
from trainer.checkpoint.folder import all_steps, read_trainer_file, tidy
from trainer.checkpoint.owner import Owner
from trainer.durable import atomic_write

_FOLDER, _CHECKPOINTS = "attempts", "checkpoints"


@dataclass(frozen=True)
class Attempt:
    """One incarnation of a run. A small value: rank 0 begins it and sends it to the others."""

    run_folder: Path
    number: int

    @classmethod
    def begin(cls, run_folder: Path, owner: Owner | None = None) -> Attempt:
        """Take the next number, fence the older attempts off and clear away what they left.

        On one process of the job only, `owner` (this one by default). ``run_folder`` must exist.

        Raises:
            CheckpointError: the run folder cannot be written, or another job is at work in it.
        """
        owner = owner or Owner.here()
        try:
            attempt = cls(run_folder, _claim(run_folder, owner))
            tidy(run_folder / _CHECKPOINTS, attempt.number)
            _record(attempt, owner, published(run_folder / _CHECKPOINTS))
        except OSError as error:
            raise CheckpointError(f"{error.filename or run_folder}: {error.strerror}") from None
        return attempt

    def finish(self) -> None:
        """Note that the run is finished: a scheduler's word for how its processes ended is not."""
        _write(self.record, {**_content(self.record), "finished": True})

    def end(self) -> None:
        """Note that this attempt has ended in good order: nobody need wonder whether it lives."""
        _write(self.record, {**_content(self.record), "ended": True})

    def disown_after(self, step: int) -> None:
        """Let later checkpoints count no more: they stay on the disk until others take their place.

        What this attempt publishes counts.
        """
        content = _content(self.record)
        found = _found(content) or all_steps(self.run_folder / _CHECKPOINTS)
        kept = [one for one in found if one <= step]
        _write(self.record, {**content, "checkpoints": kept})

    @property
    def record(self) -> Path:
        """The file that made this attempt, and its heart."""
        return self.run_folder / _FOLDER / f"{self.number:06d}.json"

    def check(self) -> None:
        """Return while this is the newest attempt.

        Raises:
            StaleAttempt: a newer attempt has begun, or the run folder is not this run's any more.
        """
        newest = max(_numbers(self.run_folder / _FOLDER), default=0)
        if newest == self.number:
            return
        began = f"attempt {newest} of this run has begun"
        reason = began if newest > self.number else "the run folder was removed"
        raise StaleAttempt(
            f"{self.run_folder}: {reason}; attempt {self.number} stops without touching it"
        )


def live_owner(run_folder: Path) -> Owner | None:
    """Who is at work in a run folder; None when nobody is. May take half a minute to find out."""
    newest = max(_numbers(run_folder / _FOLDER), default=0)
    record = Attempt(run_folder, newest).record
    owner = Owner.of(record) if newest else None
    return owner if owner and owner.lives(record) else None


def published(folder: Path) -> list[int]:
    """Steps of the checkpoints that count, oldest first.

    Left out is what an attempt published after a newer one had begun. ``folder`` is
    ``RUN/checkpoints``; without attempts beside it every checkpoint counts.
    """
    inherited = _inherited(folder.parent / _FOLDER)
    return [step for step in all_steps(folder) if not _came_too_late(folder, step, inherited)]


def _came_too_late(folder: Path, step: int, inherited: dict[int, set[int]]) -> bool:
    """Whether an attempt that did not find this checkpoint is newer than the one that wrote it."""
    not_found_by = [number for number, steps in inherited.items() if step not in steps]
    if not not_found_by:
        return False
    writer = read_trainer_file(folder, step).get("attempt")
    return writer is not None and writer < max(not_found_by)


def _claim(run_folder: Path, owner: Owner) -> int:
    """Take the number after the newest attempt, when nobody lives who holds that.

    Of several that begin at once, one gets the number; the others find it alive.
    """
    folder = run_folder / _FOLDER
    folder.mkdir(exist_ok=True)
    while True:
        newest = max(_numbers(folder), default=0)
        before = Attempt(run_folder, newest).record
        holder = Owner.of(before) if newest else None
        if holder and not owner.succeeds(holder) and holder.lives(before):
            raise CheckpointError(
                f"{run_folder}: this run is at work already ({holder}); let it be, end it with "
                f"`tandem stop {run_folder}`, or give this job another name"
            )
        try:
            with open(Attempt(run_folder, newest + 1).record, "x") as file:
                json.dump(owner.record(), file)
        except FileExistsError:
            continue
        return newest + 1


def _record(attempt: Attempt, owner: Owner, checkpoints: list[int]) -> None:
    content = {"attempt": attempt.number, **owner.record(), "checkpoints": checkpoints}
    _write(attempt.record, content)


def _write(record: Path, content: dict[str, Any]) -> None:
    atomic_write(record, json.dumps(content))


def _content(record: Path) -> dict[str, Any]:
    """What a record says; nothing where it was cut off or damaged."""
    try:
        content = parse_json(record.read_bytes())
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _numbers(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob("*.json") if path.stem.isdecimal()]


def _found(content: Mapping[str, Any]) -> list[int] | None:
    """Which checkpoints an attempt found, by its record; None where that does not say."""
    steps = content.get("checkpoints")
    return steps if isinstance(steps, list) else None


def _inherited(folder: Path) -> dict[int, set[int]]:
    """For each attempt, the steps it found. One that died while beginning has no say."""
    found = {number: _found(_content(folder / f"{number:06d}.json")) for number in _numbers(folder)}
    return {number: set(steps) for number, steps in found.items() if steps is not None}
