"""A checkpoint of the largest shipped job on many ranks: what rank 0 is sent, and what it does.

Every learner is cut into equal, consecutive ranges, as ZeRO cuts it. No tensor has values.
"""

from __future__ import annotations

import itertools
import math
import pickle
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

import configs
from model.initialisation import skeleton
from trainer.checkpoint.folder import MANIFEST, Retention, StoredFile, step_name
from trainer.checkpoint.manifest import digest
from trainer.checkpoint.publication import Save, Store, _commit, _Part
from trainer.checkpoint.snapshot import Fragment, Portion, Snapshot
from trainer.config import JobConfig

STATES = ("master", "exp_avg", "exp_avg_sq")
Shapes = Mapping[str, tuple[int, ...]]  # of a learner's tensors, by name


class Committed(NamedTuple):
    """What a checkpoint costs rank 0 besides its own share: bytes, CPU seconds, files.

    committing: everything between the last rank's part and the rename, and judging older ones.
    """

    gathered: int
    unpickling: float
    committing: float
    manifest: int
    files: int


def largest_job() -> dict[str, Shapes]:
    """The shapes of all tensors in the largest shipped job, by learner."""
    job = configs.load("bert_large_cluster", JobConfig, "job", ["data.path=none"])
    models = {"teacher": job.teacher.model} | {n: s.model for n, s in job.students.items()}
    return {
        name: {key: tuple(p.shape) for key, p in skeleton(model).named_parameters()}
        for name, model in models.items()
    }


def cut(shapes: Shapes, ranks: int) -> list[list[Fragment]]:
    """Each rank's fragments of a learner."""
    total = sum(math.prod(shape) for shape in shapes.values())
    ends = [total * rank // ranks for rank in range(1, ranks + 1)]
    fragments: list[list[Fragment]] = [[] for _ in ends]
    rank = at = 0
    for name, shape in shapes.items():
        done, size = 0, math.prod(shape)
        while done < size:
            numel = min(size - done, ends[rank] - at)
            fragments[rank] += [Fragment(name, s, done, numel, torch.float32) for s in STATES]
            done, at = done + numel, at + numel
            rank += at == ends[rank]
    return fragments


def snapshot(shapes: Shapes, steps: float = 1000.0) -> Snapshot:
    """What a rank knows of all of a learner's tensors."""
    scalars = {"step": {"value": steps, "dtype": "float32"}}
    tensors = {n: {"shape": list(s), "group": 0, "scalars": scalars} for n, s in shapes.items()}
    return Snapshot([], torch.empty(0, dtype=torch.uint8), tensors, {"global_steps": 1})


def sent_parts(learners: Mapping[str, Shapes], ranks: int) -> list[bytes]:
    """What each rank sends to rank 0 once it has written its files."""
    sent: list[dict[str, _Part]] = [{} for _ in range(ranks)]
    for name, shapes in learners.items():
        known = digest(snapshot(shapes))
        for rank, written in enumerate(cut(shapes, ranks)):
            stored = StoredFile(f"{name}/rank-{rank:05d}.safetensors", 1, f"{rank:064x}")
            sent[rank][name] = _Part(written, known, stored, Portion(1.0, 1, True))
    return [pickle.dumps(parts) for parts in sent]


def commit(ranks: int, folder: Path) -> Committed:
    """Commit as many checkpoints to `folder` as are kept, and one more, whose cost is returned."""
    learners = largest_job()
    sent, retention = sent_parts(learners, ranks), Retention()
    store = Store(folder, retention, None, frozenset())
    own = {name: snapshot(shapes) for name, shapes in learners.items()}
    for step in itertools.count(1):
        save = Save(step, own, {})
        (store.staging(step)).mkdir()
        began = time.process_time()
        parts = [pickle.loads(part) for part in sent]
        unpickled = time.process_time()
        _commit(save, store, store.staging(step), parts)
        ended = time.process_time()
        if step > retention.last:
            break
    manifest = (folder / step_name(step) / MANIFEST).stat().st_size
    own_files = len(list((folder / step_name(step)).iterdir()))
    return Committed(
        gathered=sum(map(len, sent)),
        unpickling=unpickled - began,
        committing=ended - unpickled,
        manifest=manifest,
        files=own_files + ranks * len(learners),
    )
