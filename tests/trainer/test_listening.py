"""A student that learns from its teacher only once the teacher is ahead (`min_lead`)."""

from __future__ import annotations

import dataclasses

import pytest
import torch.distributed as dist

import configs
from tests.distributed import run_distributed
from tests.trainer.jobs import curve, run, tiny_job, with_students
from trainer.config import JobConfig
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
FROZEN = [
    "teacher.frozen=true", "teacher.init.pretrained=elsewhere", "teacher.objective=null",
    "teacher.optimizer=null", "teacher.schedule=null", "teacher.zero_stage=0",
    "students.distilbert=null",
]  # fmt: skip
GATE = STUDENT + "objective.soft_kl.min_lead"
HEARD = (
    STUDENT + "objective={hidden_mse: {weight: 0.1}, soft_kl: {weight: 2.0}, attention_mse: null}"
)
ALONE = STUDENT + "objective={soft_kl: null, hidden_mse: {weight: 0.1}, attention_mse: null}"


def job(corpus, runs, name, *overrides):
    made = tiny_job(corpus, runs, f"name={name}", *JOB, *overrides)
    return with_students(made, tinybert=made.students["tinybert"])


def heard(corpus, runs):
    run(job(corpus, runs, f"heard-{dist.get_world_size()}", HEARD, f"{GATE}={LEAST}"))


def jobs(corpus, runs):
    least = f"{GATE}={LEAST}"
    heard(corpus, runs)
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
    run(job(corpus, runs, "never", HEARD, learns, f"{GATE}=90"))
    run(job(corpus, runs, "alone", ALONE, learns))


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("listening")
    run_distributed(jobs, 2, corpus, folder)
    return folder


def column(folder, name, learner=NAME):
    return {
        step: value
        for step, key, value in curve(RunFolder(folder), learner)
        if key == f"{learner}/{name}"
    }


@pytest.mark.slow
@pytest.mark.parametrize("run_name", ["heard-2", "whole"])
def test_terms_about_the_teacher_count_by_its_lead(runs, run_name):
    """The expected weights follow from the recorded losses of earlier steps."""
    parts = {name: column(runs / run_name, name) for name in ("mlm", "hidden_mse", "soft_kl")}
    theirs = column(runs / run_name, "mlm", "teacher")
    lead, weights = 0.0, []
    for step, loss in column(runs / run_name, "loss").items():
        weights.append(min(max(lead / LEAST - 1, 0.0), 1.0))
        others = parts["mlm"][step] + 0.1 * parts["hidden_mse"][step]
        assert loss == pytest.approx(others + weights[-1] * 2.0 * parts["soft_kl"][step], rel=1e-6)
        lead += (parts["mlm"][step] - theirs[step] - lead) / LEAD_STEPS
        assert column(runs / run_name, "lead")[step] == pytest.approx(lead, rel=1e-6)
    assert weights[0] == 0.0
    assert weights[-1] == 1.0
    assert any(0.0 < weight < 1.0 for weight in weights)


@pytest.mark.slow
def test_on_two_ranks_it_is_that_of_the_whole_batch(runs, corpus):
    run_distributed(heard, 1, corpus, runs)
    one, two = (column(runs / f"heard-{ranks}", "loss") for ranks in (1, 2))
    assert two == {step: pytest.approx(loss, rel=1e-5) for step, loss in one.items()}


@pytest.mark.slow
def test_the_lead_is_resumed(runs):
    assert curve(RunFolder(runs / "stopped")) == curve(RunFolder(runs / "whole"))


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_teacher_that_is_overtaken_after_its_budget_is_not_heard(runs):
    parts = {n: column(runs / "overtaken", n) for n in ("mlm", "hidden_mse", "lead", "loss")}
    assert parts["lead"][12] < 0
    others = {step: parts["mlm"][step] + 0.1 * parts["hidden_mse"][step] for step in range(1, 13)}
    assert all(parts["loss"][step] == pytest.approx(others[step], rel=1e-6) for step in others)


@pytest.mark.slow
def test_a_student_that_never_listens_trains_as_if_alone(runs):
    never, alone = (column(runs / name, "mlm") for name in ("never", "alone"))
    assert never == alone


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([*FROZEN, f"{GATE}=0.1"], "soft_kl.min_lead: is about a teacher that this job trains"),
        ([f"{STUDENT}objective={{mlm: null, soft_kl: {{min_lead: 0.1}}}}"], "compares losses, so"),
        ([f"{STUDENT}min_lead=0.1"], "students.tinybert.min_lead: unknown key"),
    ],
)
def test_a_gate_without_effect_is_refused(corpus, tmp_path, overrides, reason):
    with pytest.raises(configs.ConfigError) as failed:
        tiny_job(corpus, tmp_path, *overrides)
    assert reason in str(failed.value)


@pytest.mark.parametrize(
    "beside",
    ["", "cosine: {}", "hidden_mse: {}, attention_mse: {}", "top_k: 3", "start: {step: 1}"],
)
def test_the_gate_of_a_term_does_not_depend_on_what_is_beside_it(beside):
    """It is the term's own default, for every student of a teacher that the job trains."""
    term = f"soft_kl: {{{beside if beside == 'top_k: 3' else ''}}}"
    more = f", {beside}" if "_mse" in beside or "cosine" in beside else ""
    start = f", {beside}" if "start" in beside else ""
    text = f"""
name: x
steps: 9
data: {{path: x}}
teacher: {{model: bert_mini, objective: {{mlm: {{}}}}}}
students: {{x: {{model: bert_mini, objective: {{mlm: {{}}, {term}{more}}}{start}}}}}
"""
    job = configs.load_text(text, JobConfig, "job", [], "x")
    assert job.students["x"].objective.soft_kl.min_lead == 0.25
    assert job.students["x"].waits_for(job.teacher)


def test_a_student_without_labels_in_common_with_its_teacher_never_waits():
    demo = configs.load("demo", JobConfig, "job", ["students.tinybert.objective.mlm=null"])
    assert not demo.students["tinybert"].waits_for(demo.teacher)


def test_a_wrong_value_is_named_by_its_key():
    with pytest.raises(configs.ConfigError, match=r"students.tinybert.start.step: must be"):
        configs.load("demo", JobConfig, "job", ["students.tinybert.start={step: soon}"])
