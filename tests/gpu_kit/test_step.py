"""A budget for what a joint step costs besides arithmetic: host syncs, collectives, bytes.

When a number falls, lower it here. A number that rises is a regression; the lists that the
assertions print name the lines.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.gpu_kit.engine_step import engine_step
from tests.gpu_kit.joint_step import SYNCS, count_step
from tests.gpu_kit.ranks import run_as_rank_zero

STUDENTS = 3
BYTES = {0: 390_000, 1: 775_000, 2: 1_160_000, 3: 1_170_000}  # by ZeRO stage, on two ranks
# Collectives that one more student adds. Stages 2 and 3 reduce after each of two backward passes,
# or would have to keep whole gradients.
PER_STUDENT = {0: 1, 1: 2, 2: 3, 3: 3}


@pytest.mark.parametrize(("stage", "ranks"), [(2, 512), *itertools.product(range(4), (2, 4096))])
def test_a_step_keeps_to_its_budget(stage, ranks, record_property):
    found = run_as_rank_zero(count_step, ranks, stage, STUDENTS)
    record_property("cpu_seconds", found.seconds)
    assert sum(found.syncs.values()) <= SYNCS[stage], found.syncs.most_common()
    if ranks == 2:  # on more, shards of a tiny model are mostly padding
        assert sum(one.bytes for one in found.sent) <= BYTES[stage]
    added = len(found.sent) - len(found.sent_without_one)
    lines = Counter(one.line for one in found.sent)
    assert added <= PER_STUDENT[stage], lines.most_common()


@pytest.mark.parametrize("stage", [1, 3])
def test_nothing_in_a_step_is_done_for_every_rank(stage):
    few, many = (run_as_rank_zero(engine_step, ranks, stage, 2) for ranks in (2, 4096))
    assert len(many.sent) == len(few.sent)
    assert many.operators < 1.1 * few.operators


def test_nobody_waits_for_deepspeeds_timers_or_for_a_reduction_that_overlaps_nothing():
    for stage in (0, 1, 2):
        syncs = run_as_rank_zero(count_step, 2, stage, 1).syncs
        assert not [line for line in syncs if "device.synchronize" in line], stage
