"""A student that learns from its teacher only once the teacher is ahead (`min_lead`)."""

from __future__ import annotations

import dataclasses

import pytest
import torch.distributed as dist

import configs
from tests.distributed import run_distributed
from tests.trainer.jobs import curve, run, tiny_job, with_students
from trainer.config import JobConfig
from trainer.default_lead import MIN_LEAD
from trainer.learners.learner import LEAD_STEPS
from trainer.run_folder.folder import RunFolder

NAME = "students/tinybert"
LEAST = 0.01
# The student stands still, and the teacher leaves it behind.
JOB = [
    "steps=12", "teacher.zero_stage=1", "teacher.optimizer.learning_rate=1e-2",
    "teacher.schedule.warmup_steps=0", "students.tinybert.optimizer.learning_rate=1e-30",
]  # fmt: skip
STUDENT = "students.tinybert."
HEARD = (
    STUDENT + "objective={hidden_mse: {weight: 0.1}, soft_kl: {weight: 2.0}, attention_mse: null}"
)
ALONE = STUDENT + "objective={soft_kl: null, hidden_mse: null, attention_mse: null}"


def job(corpus, runs, name, *overrides):
    made = tiny_job(corpus, runs, f"name={name}", *JOB, *overrides)
    return with_students(made, tinybert=made.students["tinybert"])


def jobs(corpus, runs):
    ranks, least = dist.get_world_size(), f"{STUDENT}min_lead={LEAST}"
    run(job(corpus, runs, f"heard-{ranks}", HEARD, least))
    if ranks == 1:
        return
    whole = job(corpus, runs, "whole", HEARD, least, f"{STUDENT}zero_stage=2")
    run(whole)
    stopped = dataclasses.replace(whole, name="stopped")
    run(stopped, stop_after=7)
    run(stopped)
    finished = job(corpus, runs, "finished", HEARD, least, "teacher.budget.steps=6")
    run(finished)
    again = dataclasses.replace(finished, name="finished-again")
    run(again, stop_after=8)
    run(again)
    overtakes = f"{STUDENT}optimizer.learning_rate=1e-2", f"{STUDENT}schedule.warmup_steps=0"
    stands = "teacher.optimizer.learning_rate=1e-30"
    run(job(corpus, runs, "overtaken", HEARD, least, "teacher.budget.steps=4", *overtakes, stands))
    learns = f"{STUDENT}optimizer.learning_rate=1e-3"
    run(job(corpus, runs, "never", HEARD, learns, f"{STUDENT}min_lead=90"))
    run(job(corpus, runs, "alone", ALONE, learns))


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("listening")
    for ranks in (1, 2):
        run_distributed(jobs, ranks, corpus, folder)
    return folder


def column(folder, name, learner=NAME):
    return {
        step: value
        for step, key, value in curve(RunFolder(folder), learner)
        if key == f"{learner}/{name}"
    }


@pytest.mark.parametrize("run_name", ["heard-1", "heard-2", "whole"])
def test_terms_about_the_teacher_count_by_its_lead(runs, run_name):
    """The expected weights follow from the recorded losses of earlier steps."""
    parts = {name: column(runs / run_name, name) for name in ("mlm", "hidden_mse", "soft_kl")}
    theirs = column(runs / run_name, "mlm", "teacher")
    lead, weights = 0.0, []
    for step, loss in column(runs / run_name, "loss").items():
        weights.append(min(max(lead / LEAST - 1, 0.0), 1.0))
        about_teacher = 0.1 * parts["hidden_mse"][step] + 2.0 * parts["soft_kl"][step]
        assert loss == pytest.approx(parts["mlm"][step] + weights[-1] * about_teacher, rel=1e-6)
        lead += (parts["mlm"][step] - theirs[step] - lead) / LEAD_STEPS
        assert column(runs / run_name, "lead")[step] == pytest.approx(lead, rel=1e-6)
    assert weights[0] == 0.0
    assert weights[-1] == 1.0
    assert any(0.0 < weight < 1.0 for weight in weights)


def test_on_two_ranks_it_is_that_of_the_whole_batch(runs):
    one, two = (column(runs / f"heard-{ranks}", "loss") for ranks in (1, 2))
    assert two == {step: pytest.approx(loss, rel=1e-5) for step, loss in one.items()}


def test_the_lead_is_resumed(runs):
    assert curve(RunFolder(runs / "stopped")) == curve(RunFolder(runs / "whole"))


def test_the_rule_holds_when_the_teachers_budget_has_ended(runs):
    """A teacher that no longer learns is still compared, on the same words as its student."""
    parts = {name: column(runs / "finished", name) for name in ("mlm", "lead", "loss")}
    theirs = column(runs / "finished", "mlm", "teacher")
    assert [*theirs] == [*range(1, 7)]
    leads = parts["lead"]
    implied = {
        step: parts["mlm"][step] - (leads[step] - leads[step - 1]) * LEAD_STEPS - leads[step - 1]
        for step in range(2, 13)
    }  # the teacher's loss, by the rule of the running mean
    assert all(implied[step] == pytest.approx(theirs[step], abs=1e-4) for step in range(2, 7))
    after = [implied[step] for step in range(7, 13)]
    assert max(after) - min(after) < 0.5, "it stands still"
    assert abs(sum(after) / len(after) - theirs[6]) < 0.5
    assert curve(RunFolder(runs / "finished-again")) == curve(RunFolder(runs / "finished"))


def test_a_teacher_that_is_overtaken_after_its_budget_is_not_heard(runs):
    parts = {n: column(runs / "overtaken", n) for n in ("mlm", "lead", "loss")}
    assert parts["lead"][12] < 0
    assert all(parts["loss"][step] == parts["mlm"][step] for step in range(1, 13))


def test_a_student_that_never_listens_trains_as_if_alone(runs):
    never, alone = (column(runs / name, "mlm") for name in ("never", "alone"))
    assert never == alone


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("teacher.min_lead=0.1", "teacher.min_lead: is for students"),
        (
            "students.tinybert={min_lead: 0.1, objective: {soft_kl: null, hidden_mse: null, "
            "attention_mse: null}}",
            "students.tinybert.min_lead: nothing in its objective is about the teacher",
        ),
        (
            "students.tinybert={min_lead: 0.1, objective: {mlm: null, soft_kl: {}}}",
            "students.tinybert.min_lead: compares losses, so that student and teacher need",
        ),
    ],
)
def test_who_cannot_compare_is_refused(corpus, tmp_path, override, reason):
    with pytest.raises(configs.ConfigError) as failed:
        tiny_job(corpus, tmp_path, override)
    assert reason in str(failed.value)


PREDICTIONS = "students.tinybert.objective={hidden_mse: null, attention_mse: null}"


@pytest.mark.parametrize(
    ("overrides", "lead"),
    [
        ([], MIN_LEAD),
        (["students.tinybert.objective.hidden_mse={weight: 0.1}"], None),
        (["students.tinybert.start={step: 0}"], MIN_LEAD),
        (["students.tinybert.min_lead=null"], None),
        (["students.tinybert.min_lead=1.0"], 1.0),
        (["students.tinybert.start={step: 1}"], None),
        (["students.tinybert.start={fraction: 0.4}"], None),
        (["students.tinybert.start={teacher: {at_least: 0.1}}"], None),
        (["teacher.init.pretrained=elsewhere"], None),
        (["teacher.init={pretrained: elsewhere, random: true}"], MIN_LEAD),
        (["students.tinybert.objective.mlm=null"], None),
        (["students.tinybert.objective.soft_kl=null"], None),
    ],
)
def test_who_waits_for_an_untrained_teacher_by_default(overrides, lead):
    demo = configs.load("demo", JobConfig, "job", [PREDICTIONS, *overrides])
    assert demo.students["tinybert"].min_lead == lead
    assert demo.students["distilbert"].min_lead is None  # it begins once the teacher is better


def test_a_copy_of_the_teachers_layers_does_not_wait():
    demo = configs.load("demo", JobConfig, "job", ["students.distilbert.start={teacher: null}"])
    assert demo.students["distilbert"].min_lead is None


def test_a_wrong_value_is_named_by_its_key():
    with pytest.raises(configs.ConfigError, match=r"students.tinybert.start.step: must be"):
        configs.load("demo", JobConfig, "job", ["students.tinybert.start={step: soon}"])
