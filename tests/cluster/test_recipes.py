"""The cost of the usual recipe and of a joint job, against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest

from cluster.planning.machine import Machine
from cluster.planning.plan import compare, make_plan
from cluster.planning.text import describe
from configs.plan_facts import JobFacts
from tests.cluster import plans
from tests.cluster.plans import H100
from tests.conftest import tandem

TEACHER = dataclasses.replace(plans.TEACHER, forward_flops=3e9, backward_flops=6e9)
SMALL = dataclasses.replace(TEACHER, name="small", forward_flops=1e9, backward_flops=2e9)
LATE = dataclasses.replace(SMALL, name="late", active=0.5)
JOB = JobFacts("job", 1000, 64, 128, 8, 100, (TEACHER, SMALL, LATE))
FROZEN = dataclasses.replace(TEACHER, trained=0, backward_flops=0.0, forward_flops=2.5e9)
ALONE = dataclasses.replace(SMALL, forward_flops=1.5e9)  # what it shared, it computes itself
APART = [FROZEN, ALONE, dataclasses.replace(ALONE, name="late", active=0.5)]
ONE_GPU = Machine(H100, 1, 1, launch=0.0, price=2.0)


def gpu_hours(flops: float, updates: int) -> float:
    """On one H100, with the rate and bandwidth of its data sheet, at an MFU of 30%.

    For each parameter Adam's update reads 4 float32 numbers (parameter, gradient, two moments)
    and writes 3 (all but the gradient).
    """
    update = 28 * 1_000_000 / 3.35e12
    return (flops / (0.3 * 989.4e12) + updates * update) / 3600


def test_costs_are_those_of_the_jobs_by_hand():
    joint, separate, shared = compare(JOB, APART, ONE_GPU)
    pretraining = 64 * 1000 * 9e9
    flops = {
        "joint": pretraining + 64 * (1000 * 3e9 + 500 * 3e9),
        "separate": pretraining + 64 * (1000 * (2.5e9 + 3.5e9) + 500 * (2.5e9 + 3.5e9)),
        "shared": pretraining + 64 * (1000 * (2.5e9 + 3e9) + 500 * 3e9),
    }
    for one in (joint, separate, shared):
        assert one.flops == pytest.approx(flops[one.recipe])
        assert one.gpu_hours == pytest.approx(gpu_hours(flops[one.recipe], updates=2500))
        assert one.cost == pytest.approx(2 * one.gpu_hours)
        assert one.ratio == pytest.approx(joint.gpu_hours / one.gpu_hours)


def test_a_saving_buys_steps_of_the_teacher_alone():
    joint, separate, _ = compare(JOB, APART, ONE_GPU)
    assert joint.teacher_steps == 1000
    a_step = gpu_hours(64 * 9e9, updates=1)
    more = int((separate.gpu_hours - joint.gpu_hours) / a_step)
    assert separate.teacher_steps == 1000 + more
    assert more > 0
    longer = dataclasses.replace(JOB, steps=1000 + more)
    steps = [
        TEACHER,
        *(
            dataclasses.replace(one, active=one.active * 1000 / longer.steps)
            for one in (SMALL, LATE)
        ),
    ]
    at_equal_cost = make_plan(dataclasses.replace(longer, learners=tuple(steps)), ONE_GPU).gpu_hours
    assert at_equal_cost == pytest.approx(separate.gpu_hours, rel=1e-3)


def test_a_frozen_teacher_is_not_pre_trained_and_gains_no_steps():
    learners = (FROZEN, SMALL, LATE)
    joint, separate, shared = compare(dataclasses.replace(JOB, learners=learners), APART, ONE_GPU)
    assert joint.flops == shared.flops == pytest.approx(64 * (1000 * 5.5e9 + 500 * 3e9))
    assert separate.flops == pytest.approx(64 * 1500 * 6e9)
    assert {one.teacher_steps for one in (joint, separate, shared)} == {None}


def test_without_students_there_is_nothing_to_compare():
    alone = dataclasses.replace(JOB, learners=(TEACHER,))
    plan = make_plan(alone, ONE_GPU, APART[:1])
    assert plan.recipes == []
    assert "teacher steps" not in describe(plan)


@pytest.mark.parametrize(("rows", "size"), [(6, "2 micro-batches of up to 4"), (4, "batch of 4")])
def test_micro_batches_of_different_sizes_are_told_so(rows: int, size: str) -> None:
    plan = make_plan(dataclasses.replace(JOB, rows=rows, micro_batch=4), ONE_GPU)
    assert f"{size}." in describe(plan).splitlines()[1]


@pytest.mark.slow
def test_the_command_sets_a_job_beside_the_usual_recipe():
    keys = ["batch.size=64", "steps=1000", "--gpus-per-node", 1, "--price", 3]
    done = tandem("plan", "demo", *keys, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    joint, separate, shared = plan["recipes"]
    assert joint["gpu_hours"] == pytest.approx(plan["gpu_hours"])
    assert joint["flops"] == pytest.approx(1000 * plan["time"]["flops"])
    assert joint["flops"] < shared["flops"] < separate["flops"]
    assert joint["teacher_steps"] == 1000 < shared["teacher_steps"] < separate["teacher_steps"]
    told = tandem("plan", "demo", *keys).stdout
    assert f"{separate['teacher_steps']:,}" in told
    assert f"{separate['ratio']:.3f}" in told
