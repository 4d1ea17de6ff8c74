"""A teacher that finishes before its job is a frozen teacher from then on."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import configs
from model import from_pretrained
from tests.distributed import run_distributed
from tests.thorough import zero_stages
from tests.trainer.jobs import curve, finish, run, tiny_job
from trainer.errors import TrainingError
from trainer.footprint.demands import demands
from trainer.learner_life import BudgetConfig
from trainer.run_folder.folder import RunFolder

STUDENTS = ("students/distilbert", "students/tinybert")
STEPS, BUDGET = 6, 3
FROZEN = ["teacher.objective=null", "teacher.optimizer=null", "teacher.schedule=null",
          "teacher.frozen=true", "teacher.zero_stage=0"]  # fmt: skip
LATE = [f"students.{name.partition('/')[2]}.start={{fraction: 0.5}}" for name in STUDENTS]
STAGES = zero_stages(3)


def in_one_job_and_in_two(corpus, runs):
    """A teacher that trains for 3 steps, then only teaches for 3; the same in two jobs."""
    steps = f"steps={STEPS}"
    job = tiny_job(corpus, runs, "name=one", steps, *LATE, "teacher.budget.fraction=0.5")
    finish(run(job))
    finish(run(tiny_job(corpus, runs, "name=first", "students=null", f"steps={BUDGET}")))
    rounded = "teacher.precision=bf16_weights", f"teacher.budget.steps={BUDGET}"
    finish(run(tiny_job(corpus, runs, "name=rounded", steps, *LATE, *rounded)))
    pretrained = f"teacher.init.pretrained={runs / 'first' / 'exports' / 'teacher'}"
    run(tiny_job(corpus, runs, "name=second", steps, *LATE, pretrained, *FROZEN))
    for stage in STAGES:
        staged = tiny_job(
            corpus, runs, f"name=whole-{stage}", steps, *LATE, f"teacher.budget.steps={BUDGET}",
            f"teacher.zero_stage={stage}",
        )  # fmt: skip
        run(staged)
        stopped = dataclasses.replace(staged, name=f"stopped-{stage}")
        for stop in (BUDGET - 1, BUDGET, BUDGET + 1):
            run(stopped, stop_after=stop)
        larger = dataclasses.replace(stopped.teacher, budget=BudgetConfig(steps=BUDGET + 2))
        with pytest.raises(TrainingError, match=r"teacher\.budget: a larger budget comes too late"):
            run(dataclasses.replace(stopped, teacher=larger))
        run(stopped)


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("budget")
    run_distributed(in_one_job_and_in_two, 2, corpus, folder)
    return folder


@pytest.mark.slow
def test_it_ends_as_the_teacher_of_a_job_that_ends_there(runs):
    one, first = (
        from_pretrained(runs / name / "exports" / "teacher").state_dict()
        for name in ("one", "first")
    )
    assert all(torch.equal(one[name], tensor) for name, tensor in first.items())
    trained = {step for step, _, _ in curve(RunFolder(runs / "one"), "teacher/lr")}
    assert trained == {1, 2, 3}


@pytest.mark.slow
def test_it_keeps_the_masters_of_bf16_weights(runs):
    kept = from_pretrained(runs / "rounded" / "exports" / "teacher").state_dict()
    matrices = [tensor for tensor in kept.values() if tensor.ndim == 2]
    assert not any(torch.equal(tensor, tensor.bfloat16().float()) for tensor in matrices)


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDENTS)
def test_its_students_learn_what_they_learn_from_a_frozen_one(runs, name):
    one, second = (curve(RunFolder(runs / run), name) for run in ("one", "second"))
    assert len(one) > 20
    assert one == second


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_stopped_before_at_and_after_the_end_of_its_budget(runs, stage):
    stopped, whole = (curve(RunFolder(runs / f"{name}-{stage}")) for name in ("stopped", "whole"))
    assert stopped == whole


@pytest.mark.slow
def test_afterwards_it_costs_its_forward(corpus, tmp_path):
    halves, whole = (
        demands(tiny_job(corpus, tmp_path, *override), "cpu").learners[0]
        for override in (["teacher.budget.fraction=0.5"], [])
    )
    assert halves.active == whole.active == 1.0
    assert halves.backward_flops == pytest.approx(whole.backward_flops / 2)
    assert whole.forward_flops / 2 < halves.forward_flops < whole.forward_flops


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["students=null", "teacher.budget.steps=2"], "teacher.budget: is for a teacher that"),
        (
            ["teacher.budget={steps: 2, fraction: 0.5}"],
            "teacher.budget.fraction: set either this or steps",
        ),
        (["students.tinybert.start={step: 2, fraction: 0.5}"], "start.fraction: set either this"),
        (["teacher.start.fraction=0.5"], "teacher.start: is for students"),
        (
            ["teacher.budget.steps=2", "teacher.stacking.steps=[1]"],
            "teacher.budget: is for a teacher of one size",
        ),
    ],
)
def test_what_does_not_fit_is_refused(corpus, tmp_path, overrides, reason):
    with pytest.raises(configs.ConfigError) as failed:
        tiny_job(corpus, tmp_path, *overrides)
    assert reason in str(failed.value)
