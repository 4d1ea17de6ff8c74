"""A checkpoint of a teacher and four students at 4,096 ranks, as rank 0 assembles it."""

from __future__ import annotations

import math
import pickle

import pytest

from tests.gpu_kit.checkpoint_of_many import cut, largest_job, sent_parts, snapshot
from trainer.checkpoint.manifest import digest, merge_learner
from trainer.errors import CheckpointError

RANKS = 4096


@pytest.fixture(scope="module")
def learners():
    """The shapes of all tensors in the largest shipped job, by learner."""
    return largest_job()


def test_rank_0_gathers_little_and_the_record_has_no_gap(learners):
    sent = sent_parts(learners, RANKS)
    assert RANKS * max(map(len, sent)) < 20e6  # bytes; 281 MB when all sent what they know
    parts = [pickle.loads(one) for one in sent]
    for name, shapes in learners.items():
        written = [(part[name].fragments, part[name].digest) for part in parts]
        record = merge_learner(snapshot(shapes), written, range(RANKS))
        for key, tensor in record.tensors.items():
            assert sum(numel for _, numel, _ in tensor.fragments) == math.prod(shapes[key])


def test_a_rank_that_has_made_other_steps_is_named(learners):
    shapes = learners["teacher"]
    known = digest(snapshot(shapes))
    sent = [(written, known) for written in cut(shapes, RANKS)]
    sent[7] = (sent[7][0], digest(snapshot(shapes, steps=999.0)))
    with pytest.raises(CheckpointError, match=r"rank 7 has .* the ranks have diverged"):
        merge_learner(snapshot(shapes), sent, range(RANKS))
