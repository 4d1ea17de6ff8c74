"""The checkpoint folder: names, contents, durable files, retention, and an old writer's leftovers.

``step-000001000`` is a published checkpoint. Other names exist only for a moment or after a crash;
N is the attempt that made them: ``….writing-N`` (unfinished), ``….replaced-N`` (moved aside while
its successor takes the name) and ``….deleted-N`` (being removed).

A file is written once, hashed while it is written, and fsynced before use.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from configs.durable import fsync, while_unchanged
from configs.errors import ConfigError
from configs.rules import COUNT, INDEX
from configs.section import Section
from configs.strict_json import from_json, read_json

MANIFEST = "manifest.json"
TRAINER = "trainer.json"
METRICS = "metrics.jsonl"  # the newest rows of the run's metrics
_PUBLISHED = re.compile(r"step-(\d{9,})")
_TEMPORARY = re.compile(r"(step-\d{9,})\.(writing|replaced|deleted)-(\d+)")
_CHUNK = 16 * 2**20  # bytes hashed and written at a time; both release the GIL
_SAFETENSORS = {  # the format's names of dtypes
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Scores = Mapping[str, Any]  # learner -> {"metric": its name, "value": the score}


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
class _Counters:
    started_at: int = 0


@dataclass(frozen=True)
class _State:
    learners: dict[str, _Counters] = field(default_factory=dict)
    is_regular: bool = True


@dataclass(frozen=True)
class _TrainerFile:
    """The part of ``trainer.json`` that is read before its checksum is verified."""

    attempt: Any = None
    scores: dict[str, _Score] = field(default_factory=dict)
    metric: float | None = None  # of old checkpoints, which have no scores
    metric_name: str | None = None
    state: _State = field(default_factory=_State)


def read_trainer_file(folder: Path, step: int) -> dict[str, Any]:
    """``trainer.json``: step, attempt, the learners' scores and the trainer's own state.

    Empty if it is missing or damaged: the verification of the checkpoint reports the damage.
    """
    try:
        tree = read_json(folder / step_name(step) / TRAINER)
    except (OSError, ConfigError):
        return {}
    return tree if isinstance(tree, dict) else {}


def writer_of(folder: Path, step: int) -> int | None:
    """The number of the attempt that wrote a checkpoint; None if its file does not say."""
    writer = _trainer_file(folder, step).attempt
    return writer if isinstance(writer, int) else None


def is_regular(folder: Path, step: int) -> bool:
    """Whether a checkpoint may count in averages; those that requests add do not."""
    return _trainer_file(folder, step).state.is_regular


def _trainer_file(folder: Path, step: int) -> _TrainerFile:
    """An empty one where it is damaged: the verification of the checkpoint reports the damage."""
    try:
        return _read(folder / step_name(step) / TRAINER)
    except (OSError, ConfigError):
        return _TrainerFile()


@while_unchanged  # it holds all losses of a run, and every save asks about all checkpoints
def _read(path: Path) -> _TrainerFile:
    return from_json(read_json(path), _TrainerFile, TRAINER)


def scores_by_step(folder: Path, steps: Sequence[int]) -> dict[int, dict[str, Any]]:
    """The scores that the checkpoints of these ascending `steps` store, as `scores_of`.

    Those from before a learner's start, as the last checkpoint tells it, are left out: they are of
    an earlier learner of that name, which a config has dropped or a fork begun anew.
    """
    learners = _trainer_file(folder, steps[-1]).state.learners if steps else {}
    starts = {name: counters.started_at for name, counters in learners.items()}
    return {
        step: {
            name: score
            for name, score in scores_of(folder, step).items()
            if step > starts.get(name, -1)
        }
        for step in steps
    }


def scores_of(folder: Path, step: int) -> dict[str, Any]:
    """The learners' scores that a checkpoint stores, each with its metric; see `Ranking`.

    Old checkpoints have one score: the teacher's.
    """
    trainer = _trainer_file(folder, step)
    if trainer.metric is None:
        return {name: dataclasses.asdict(score) for name, score in trainer.scores.items()}
    return {"teacher": {"metric": trainer.metric_name, "value": trainer.metric}}


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


@dataclass(frozen=True)
class StoredFile:
    """A written file: its path relative to the checkpoint, its size and the sha256 of its bytes."""

    path: str
    bytes: int
    sha256: str


def write_durably(folder: Path, path: str, chunks: Iterable[bytes | memoryview]) -> StoredFile:
    """Write ``chunks`` to a new file ``folder/path`` and fsync it.

    Raises:
        OSError: with the path, whichever call failed.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with open(folder / path, "xb", buffering=0) as file:
            for chunk in chunks:
                digest.update(chunk)
                size += _write_all(file, memoryview(chunk))
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder / path)) from None
    return StoredFile(path, size, digest.hexdigest())


def _write_all(file: FileIO, data: memoryview) -> int:
    """Write all bytes to an unbuffered file, whose `write` may take only a part."""
    rest = data
    while rest.nbytes:
        rest = rest[file.write(rest) :]
    return data.nbytes


def copy_durably(source: Path, target: Path) -> None:
    """Copy a file, and fsync the copy."""
    shutil.copyfile(source, target)
    fsync(target)


def write_json(folder: Path, path: str, content: Any) -> StoredFile:
    """Write ``content`` as JSON, durably."""
    return write_durably(folder, path, [json.dumps(content).encode()])


def safetensors_chunks(header: bytes, data: Tensor) -> Iterable[bytes | memoryview]:
    """A safetensors file, from its header and data (uint8 [bytes]), as `write_durably` takes it."""
    yield header
    view = data.numpy()
    for at in range(0, len(view), _CHUNK):
        yield view[at : at + _CHUNK].data


def safetensors_header(tensors: Mapping[str, tuple[torch.dtype, int]]) -> bytes:
    """The header for flat tensors ``{name: (dtype, elements)}`` stored back to back in this order.

    The format: 8 bytes of little-endian length, then JSON padded with spaces to 8 bytes
    (https://github.com/huggingface/safetensors#format).
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, numel) in tensors.items():
        end = at + numel * dtype.itemsize
        entries[name] = {"dtype": _SAFETENSORS[dtype], "shape": [numel], "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class Ranking:
    """How the checkpoints of a learner are ranked: by its scores of this metric.

    Scores of another metric do not count: they do not compare.
    """

    learner: str
    metric: str
    highest: bool = False

    def score(self, scores: Scores) -> float | None:
        """The learner's score among those of a checkpoint; None if it has none of this metric.

        Checkpoints of old versions may not name theirs, which then counts as this one.
        """
        entry = scores.get(self.learner)
        return entry["value"] if entry and entry["metric"] in (self.metric, None) else None

    def is_better(self, score: float, than: float) -> bool:
        """Whether a score is better than another one."""
        return score > than if self.highest else score < than

    def ranked(self, scores: Mapping[int, Scores]) -> list[int]:
        """The steps of the checkpoints that have a score, the best first; of equal ones the first.

        `scores` are those of every checkpoint, by its step.
        """
        values = {step: self.score(learners) for step, learners in scores.items()}
        measured = {step: value for step, value in values.items() if value is not None}
        sign = -1 if self.highest else 1
        return sorted(measured, key=lambda step: (sign * measured[step], step))


@dataclass(frozen=True)
class Retention(Section):
    """Keeps the ``last`` checkpoints, those at multiples of ``every`` steps, and the ``best`` ones.

    Of those at multiples of ``regular`` steps it keeps the last ``averaged``.
    The best are those of each learner among `rankings`, by the scores passed to ``save``. Suspect
    checkpoints are never among the best, and never replace sound ones among the last.
    """

    last: Annotated[int, COUNT] = 3
    every: Annotated[int | None, COUNT] = None
    best: Annotated[int, INDEX] = 0
    rankings: tuple[Ranking, ...] = field(default=())
    regular: Annotated[int, COUNT] = 1
    averaged: Annotated[int, INDEX] = 0

    def scores_to_store(self, scores: Mapping[str, float]) -> dict[str, dict[str, Any]]:
        """The finite ones among the learners' scores, each with the name of its metric."""
        metrics = {ranking.learner: ranking.metric for ranking in self.rankings}
        return {
            learner: {"metric": metrics[learner], "value": score}
            for learner, score in scores.items()
            if learner in metrics and math.isfinite(score)
        }

    def expired(
        self, scores: Mapping[int, Scores], pinned: Collection[int], suspect: Collection[int] = ()
    ) -> list[int]:
        """Steps to delete, oldest first.

        Args:
            scores: step -> the learners' scores, of every checkpoint.
            pinned: steps never to delete, such as the one that this run resumed from.
            suspect: steps of suspect checkpoints.
        """
        steps = sorted(scores)
        sound = {step: scores[step] for step in steps if step not in suspect}
        keep = {*steps[-self.last :], *[*sound][-self.last :], *pinned}
        for ranking in self.rankings:
            keep.update(ranking.ranked(sound)[: self.best])
        if self.averaged:
            keep.update([step for step in steps if step % self.regular == 0][-self.averaged :])
        if self.every is not None:
            keep |= {step for step in steps if step % self.every == 0}
        return [step for step in steps if step not in keep]
