"""A checkpoint of a teacher and four students at 4,096 ranks, as rank 0 assembles it."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

import configs
from model.skeleton import skeleton
from trainer.checkpoint.errors import CheckpointError
from trainer.checkpoint.manifest import Manifest, digest, merge_learner
from trainer.checkpoint.publication import _Part
from trainer.checkpoint.snapshot import Fragment, Snapshot
from trainer.checkpoint.soundness import Portion
from trainer.checkpoint.storage import StoredFile
from trainer.config import JobConfig

RANKS = 4096
STATES = ("master", "exp_avg", "exp_avg_sq")


def cut(shapes):
    """Each rank's fragments of a learner that is cut into equal, consecutive ranges."""
    total = sum(math.prod(shape) for shape in shapes.values())
    ends = [total * rank // RANKS for rank in range(1, RANKS + 1)]
    ranks, rank, at = [[] for _ in ends], 0, 0
    for name, shape in shapes.items():
        done, size = 0, math.prod(shape)
        while done < size:
            numel = min(size - done, ends[rank] - at)
            ranks[rank] += [Fragment(name, s, done, numel, torch.float32) for s in STATES]
            done, at = done + numel, at + numel
            rank += at == ends[rank]
    return ranks


def snapshot(shapes, steps=1000.0):
    """One rank's snapshot of a learner."""
    scalars = {"step": {"value": steps, "dtype": "float32"}}
    tensors = {n: {"shape": list(s), "group": 0, "scalars": scalars} for n, s in shapes.items()}
    return Snapshot([], torch.empty(0, dtype=torch.uint8), tensors, {"global_steps": 1})


@pytest.fixture(scope="module")
def learners():
    """The shapes of all tensors in the largest shipped job, by learner."""
    job = configs.load("bert_large_cluster", JobConfig, "job", ["data.path=none"])
    models = {"teacher": job.teacher.model} | {n: s.model for n, s in job.students.items()}
    return {
        name: {key: tuple(p.shape) for key, p in skeleton(model).named_parameters()}
        for name, model in models.items()
    }


def test_rank_0_gathers_little_and_the_record_has_no_gap(learners):
    files, records, gathered = [], {}, 0
    for name, shapes in learners.items():
        own, parts = snapshot(shapes), []
        known = digest(own)
        for rank, written in enumerate(cut(shapes)):
            stored = StoredFile(f"{name}/rank-{rank:05d}.safetensors", 1, "0" * 64)
            parts.append(_Part(written, known, stored, Portion(1.0, 1, True)))
        gathered += sum(len(pickle.dumps(part)) for part in parts)
        numbers = range(len(files), len(files) + RANKS)
        sent = [(part.fragments, part.digest) for part in parts]
        records[name] = merge_learner(own, sent, numbers)
        files += [part.file for part in parts]
        for key, record in records[name].tensors.items():
            assert sum(numel for _, numel, _ in record.fragments) == math.prod(shapes[key])
    assert gathered < 20e6  # bytes; 281 MB when every rank sent what it knows of every tensor
    assert len(Manifest(1, RANKS, files, records).encode()["content"]["files"]) == 5 * RANKS


def test_a_rank_that_has_made_other_steps_is_named(learners):
    shapes = learners["teacher"]
    known = digest(snapshot(shapes))
    sent = [(written, known) for written in cut(shapes)]
    sent[7] = (sent[7][0], digest(snapshot(shapes, steps=999.0)))
    with pytest.raises(CheckpointError, match=r"rank 7 has .* the ranks have diverged"):
        merge_learner(snapshot(shapes), sent, range(RANKS))
