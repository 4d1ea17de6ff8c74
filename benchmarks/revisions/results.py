"""The results of a run, read from its files: every number by name and step."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import yaml
from numpy.typing import NDArray

from benchmarks.revisions.names import Names

# Costs, times and places: no results.
PASSING = re.compile(
    r"time|second|wait|stall|slowest|speed|mfu|memory|bytes_|machine|tokens_per|sequences?_per"
    r"|^corpus/path$|^learners/.*/export$|task\.json settings/examples$"
)
UNCOMPARED = {"README.md", "origin.json", "corpus.json"}  # they say where, when and how fast
DTYPES = {"F32": "<f4", "F64": "<f8", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1"}


@dataclass(frozen=True)
class Tensor:
    """A tensor as it lies in a file; `values` is flat, bytes where numpy lacks the type."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @property
    def values(self) -> NDArray[Any]:
        """Its elements, flat; single bytes of a type that numpy does not have."""
        return np.frombuffer(self.data, DTYPES.get(self.dtype, "u1"))


@dataclass(frozen=True, order=True)
class Place:
    """Where a result stands: at which step (the last, for what is made at the end), and its name.

    `kind` is batches, metrics, checkpoint, scores or export.
    """

    step: int
    kind: str
    name: str


Result = Tensor | int | float | str | bool | None
Results = dict[Place, Result]


def read(run: Path, batches: list[Path], steps: int, names: Names) -> Results:
    """All results of a run and of the batches that its ranks read."""
    return {
        place: result
        for place, result in (
            *chain.from_iterable(_batches(path, rank, names) for rank, path in enumerate(batches)),
            *_metrics(run / "metrics.jsonl", names),
            *_checkpoints(run / "checkpoints", names),
            *_scores(run / "evaluation.json", steps, names),
            *_exports(run / "exports", steps, names),
        )
        if not PASSING.search(place.name)
    }


def leave_out(results: Results, without: re.Pattern[str] | None) -> Results:
    """The results but those in whose names a pattern is found."""
    if without is None:
        return results
    return {place: x for place, x in results.items() if not without.search(place.name)}


def read_files(folder: Path) -> Results:
    """The SHA-256 of the files of a folder."""
    return {
        Place(0, "file", str(path.relative_to(folder))): _digest(path) for path in _files(folder)
    }


def _batches(path: Path, rank: int, names: Names) -> Iterator[tuple[Place, Result]]:
    with np.load(path) as arrays:
        steps = arrays["step"]
        for name in arrays.files:
            for step in np.unique(steps):
                rows = np.ascontiguousarray(arrays[name][steps == step])
                tensor = Tensor(_dtype(rows), rows.shape, rows.tobytes())
                yield Place(int(step) + 1, "batches", f"{names.metric(name)}, rank {rank}"), tensor


def _dtype(array: NDArray[Any]) -> str:
    return next((name for name, code in DTYPES.items() if array.dtype == code), str(array.dtype))


def _metrics(path: Path, names: Names) -> Iterator[tuple[Place, Result]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        step = row.pop("step")
        for key, value in row.items():
            yield Place(step, "metrics", names.metric(key)), value


def _checkpoints(folder: Path, names: Names) -> Iterator[tuple[Place, Result]]:
    """Weights and optimizer states, whole, whatever ranks and files their fragments are in."""
    fragments: dict[Place, list[tuple[int, Tensor]]] = {}
    for path in folder.glob("step-*/**/*.safetensors"):
        step, *learner = path.parent.relative_to(folder).parts
        for key, tensor in _tensors(path):
            name, state, start = key.split("|")
            name = f"{'/'.join(learner)} {names.tensor(name)} {state}"
            place = Place(int(step.removeprefix("step-")), "checkpoint", name)
            fragments.setdefault(place, []).append((int(start), tensor))
    for place, parts in fragments.items():
        data = b"".join(tensor.data for _, tensor in sorted(parts, key=lambda part: part[0]))
        yield place, Tensor(parts[0][1].dtype, (), data)


def _scores(path: Path, step: int, names: Names) -> Iterator[tuple[Place, Result]]:
    """The numbers; a score that there is not may be null or absent, and words only describe."""
    for name, value in _leaves(json.loads(path.read_text(encoding="utf-8")), ""):
        if isinstance(value, int | float):
            yield Place(step, "scores", names.metric(name)), value


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Result]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}/{key}" if path else key)
    else:
        yield path, tree if isinstance(tree, Result) else json.dumps(tree)


def _exports(folder: Path, step: int, names: Names) -> Iterator[tuple[Place, Result]]:
    for path in _files(folder):
        file = path.relative_to(folder)
        for name, result in _content(path, names):
            yield Place(step, "export", f"{file} {name}".rstrip()), result


def _content(path: Path, names: Names) -> Iterator[tuple[str, Result]]:
    """The contents of a file of an export, by name; the digest of one that has no names."""
    if path.suffix == ".safetensors":
        yield from _tensors(path)
    elif path.suffix in (".json", ".yaml"):
        leaves = _leaves(yaml.safe_load(path.read_text(encoding="utf-8")), "")
        yield from {**names.defaults, **{names.config_key(key): x for key, x in leaves}}.items()
    else:
        yield "", _digest(path)


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    for name, about in safetensors.deserialize(path.read_bytes()):
        yield name, Tensor(about["dtype"], tuple(about["shape"]), bytes(about["data"]))


def _files(folder: Path) -> list[Path]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in paths if path.name not in UNCOMPARED)


def _digest(path: Path) -> str:
    return f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
