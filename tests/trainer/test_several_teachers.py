"""Further teachers beside a job's own: one of them, or the mean of all, as the source of a term."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import configs
from data_pipeline import MASKED
from tests.conftest import TINY_JOB, tandem
from tests.distributed import run_distributed
from tests.failing import one_line
from tests.trainer import tiny
from tests.trainer.jobs import curve, finish, run, tiny_job
from tests.trainer.test_exactness import record_first_gradients
from trainer.batch_config import StepShape
from trainer.batches import to_device
from trainer.config import JobConfig
from trainer.errors import TrainingError
from trainer.footprint.demands import demands, demands_apart
from trainer.job_data.fit import require_inputs
from trainer.learner_config import LearnerConfig
from trainer.learner_life import InitConfig
from trainer.learner_names import TEACHER, student_key
from trainer.learners.learner import Learner
from trainer.learners.module import build_module
from trainer.objectives import ObjectiveConfig
from trainer.objectives.terms.predictions import SoftCrossEntropy, SoftKL
from trainer.objectives.terms.states import HiddenMSE
from trainer.run_folder.folder import RunFolder
from trainer.step import train_step
from trainer.tasks.pretraining import MaskedLanguageModelling
from trainer.tasks.soft_labels import logit_squared_error, soft_label_loss

WIDE, STUDENT, OTHER = "teachers/wide", student_key("a"), student_key("b")
TEMPERATURE = 2.0
STAGES = [(0, 0, 0), (2, 3, 3)]  # of the teacher, the further one and the student


def everyone(stages):
    """Two teachers, a student of their mean and of the wide one, and one of the teacher alone."""
    mlm, (own, further, student) = MaskedLanguageModelling(), stages
    both = ObjectiveConfig(
        mlm=mlm,
        soft_kl=SoftKL(1.5, TEMPERATURE, teacher="mean", min_lead=None),
        soft_cross_entropy=SoftCrossEntropy(teacher="wide", min_lead=None),
        hidden_mse=HiddenMSE(embedding=False, layers="top", teacher="wide"),
    )
    one = ObjectiveConfig(mlm=mlm, soft_kl=SoftKL(min_lead=None))
    wide = tiny.encoder(hidden_size=48, layers=2)
    small = tiny.encoder(hidden_size=16, layers=1)
    return {
        TEACHER: LearnerConfig(tiny.encoder(), ObjectiveConfig(mlm=mlm), zero_stage=own),
        WIDE: LearnerConfig(wide, init=InitConfig(pretrained="x"), frozen=True, zero_stage=further),
        STUDENT: LearnerConfig(small, both, zero_stage=student, gradient_clipping=0.0),
        OTHER: LearnerConfig(small, one, zero_stage=student),
    }


def plain():
    """The student's terms and gradients at the first step in plain torch, of the whole batch."""
    found, batch = everyone(STAGES[0]), to_device(tiny.random_batch(0), torch.device("cpu"))
    modules = {
        name: build_module(name, found[name], found[TEACHER].model, tiny.SEED,
                           others={WIDE: found[WIDE].model}).train(name == STUDENT)
        for name in (TEACHER, WIDE, STUDENT)
    }  # fmt: skip
    inputs = batch.input_ids, batch.segment_ids, batch.attention_mask
    outputs = {n: m.model(*inputs, output_hidden_states=True) for n, m in modules.items()}
    labels, at = batch.targets[MASKED].labels, batch.masked_positions
    logits = {n: one.logits.flatten(0, 1)[at][labels >= 0] for n, one in outputs.items()}
    mean = sum((logits[n] / TEMPERATURE).softmax(-1) for n in (TEACHER, WIDE)).detach() / 2
    ours = (logits[STUDENT] / TEMPERATURE).log_softmax(-1)
    one = logits[WIDE].softmax(-1).detach() * logits[STUDENT].log_softmax(-1)
    states = (
        modules[STUDENT].objective.terms["hidden_mse"].projection(outputs[STUDENT].hidden_states[1])
    )
    errors = (states - outputs[WIDE].hidden_states[2].detach()).square().mean(-1)
    terms = {
        "mlm": F.cross_entropy(logits[STUDENT], labels[labels >= 0]),
        "soft_kl": TEMPERATURE**2 * F.kl_div(ours, mean, reduction="batchmean"),
        "soft_cross_entropy": -one.sum(-1).mean() / tiny.VOCABULARY,
        "hidden_mse": errors[batch.attention_mask].mean(),
    }
    weights = {"soft_kl": 1.5}
    sum(weights.get(name, 1.0) * value for name, value in terms.items()).backward()
    gradients = {n: p.grad for n, p in modules[STUDENT].named_parameters() if p.grad is not None}
    return {name: value.item() for name, value in terms.items()}, gradients


def started(stages):
    found = everyone(stages)
    shape = StepShape(tiny.STEPS, tiny.SEED, 8 // dist.get_world_size() // 2, 2)
    model, others = found[TEACHER].model, {WIDE: found[WIDE].model}
    return {n: Learner(n, one, model, shape, others=others) for n, one in found.items()}


def trained(stages, students, steps=2):
    """The terms of each step, the student's first gradients, and how often the wide one ran."""
    learners = started(stages)
    calls = []
    learners[WIDE].engine.module.register_forward_hook(lambda *_: calls.append(1))
    gradients = record_first_gradients(learners[STUDENT])
    terms = [
        train_step(
            learners[TEACHER], [learners[name] for name in students],
            tiny.my_rows(tiny.random_batch(step)), step, others=[learners[WIDE]],
        ).terms
        for step in range(steps)
    ]  # fmt: skip
    return terms, gradients, len(calls)


def runs():
    by_stage = [trained(stages, (STUDENT, OTHER)) for stages in STAGES]
    return by_stage, trained(STAGES[0], (OTHER,)), trained(STAGES[0], (STUDENT,))


@pytest.fixture(scope="module")
def results():
    return run_distributed(runs, 2)[0]


def test_terms_and_gradients_are_those_of_plain_torch_at_every_stage(results):
    terms, gradients = plain()
    for stages, (steps, found, _) in zip(STAGES, results[0], strict=True):
        # A divergence is a small difference of entropies of some 5 nats, which round at 5e-7.
        assert steps[0][STUDENT] == pytest.approx(terms, rel=1e-5, abs=1e-6), stages
        assert found.keys() >= gradients.keys()
        for name, right in gradients.items():
            if not name.endswith("key.bias"):  # whose true gradient is zero
                distance = (found[name] - right).norm() / right.norm()
                assert distance < 1e-5, (stages, name)


def test_each_teacher_runs_once_and_not_for_students_who_do_not_read_it(results):
    (with_both, _, calls), *_ = results[0]
    (without, _, none), (alone, _, _) = results[1:]
    assert (calls, none) == (2 * 2, 0)
    for both, other, student in zip(with_both, without, alone, strict=True):
        assert both[OTHER] == other[OTHER]
        assert both[STUDENT] == student[STUDENT]
        assert both[TEACHER] == other[TEACHER] == student[TEACHER]


def test_the_mean_of_task_heads_is_that_of_their_probabilities_or_numbers():
    torch.manual_seed(0)
    student, *teachers = (torch.randn(5, 3, dtype=torch.float64).float() for _ in range(4))
    weights = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    found, count = soft_label_loss(student, teachers, weights, TEMPERATURE)
    mean = torch.stack([(one / TEMPERATURE).softmax(-1) for one in teachers]).mean(0)
    losses = F.kl_div((student / TEMPERATURE).log_softmax(-1), mean, reduction="none").sum(-1)
    torch.testing.assert_close(found, TEMPERATURE**2 * (losses * weights).sum())
    assert count == 4
    numbers = [one[:, :1] for one in (student, *teachers)]
    found, _ = soft_label_loss(numbers[0], numbers[1:], weights, TEMPERATURE)
    error = (numbers[0] - sum(numbers[1:]) / 3).square()[:, 0]
    torch.testing.assert_close(found, (error * weights).sum())


def test_the_squared_error_of_logits_is_that_of_the_mean_of_several():
    torch.manual_seed(0)
    student, *teachers = torch.randn(4, 5, 3)
    weights = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    there = weights.bool()
    one, count = logit_squared_error(student, teachers[:1], weights, 1.0)
    torch.testing.assert_close(one, F.mse_loss(student[there], teachers[0][there], reduction="sum"))
    assert count == 4
    several, _ = logit_squared_error(student, teachers, weights, 1.0)
    mean = torch.stack(teachers).mean(0)
    torch.testing.assert_close(several, F.mse_loss(student[there], mean[there], reduction="sum"))


def in_a_job(corpus, runs, folder):
    """One job that goes through; one that stops, and resumes without the folder of weights."""
    copy = runs / "second"
    if dist.get_rank() == 0:
        shutil.copytree(folder, copy)
    dist.barrier()
    whole = job(corpus, runs, copy, "name=whole")
    finish(run(whole))
    again = job(corpus, runs, copy, "name=again")
    run(again, stop_after=3)
    late = tiny_job(corpus, runs, "name=late", STEPS)
    run(late, stop_after=3)
    run(job(corpus, runs, copy, "name=late"))  # which gets the teacher, and the term
    if dist.get_rank() == 0:
        shutil.rmtree(copy)
    dist.barrier()
    run(again)


STEPS = "steps=6"
MEAN_OF_TWO = "students.tinybert.objective.soft_kl={teacher: mean}"


def job(corpus, runs, folder, *words):
    second = f"teachers.second={{init: {{pretrained: {folder}}}, frozen: true}}"
    return tiny_job(corpus, runs, STEPS, second, MEAN_OF_TWO, *words)


@pytest.fixture(scope="module")
def jobs_run(corpus, finished, tmp_path_factory):
    runs = tmp_path_factory.mktemp("several")
    folder = finished[0] / "exports" / "teacher"
    run_distributed(in_a_job, 2, corpus, runs, folder)
    return runs


@pytest.mark.slow
def test_a_job_with_two_teachers_resumes_to_the_last_bit(jobs_run):
    whole, again, late = (curve(RunFolder(jobs_run / n)) for n in ("whole", "again", "late"))
    assert whole == again
    assert any("teachers/second" in key for _, key, _ in whole)
    first = {step for step, key, _ in late if "teachers/second" in key}
    assert first == {4, 6}  # evaluations since it came


@pytest.mark.slow
def test_a_further_teacher_is_scored_exported_and_reported(jobs_run):
    run_folder = jobs_run / "whole"
    learners = json.loads((run_folder / "evaluation.json").read_text())["learners"]
    assert list(learners) == [
        "teacher", "teachers/second", "students/distilbert", "students/tinybert"
    ]  # fmt: skip
    assert learners["teachers/second"]["loss"] > 0
    assert (run_folder / "exports" / "teachers" / "second" / "config.json").is_file()
    card = (run_folder / "exports" / "tinybert" / "README.md").read_text()
    assert "and its finished teachers second" in card
    assert "teachers/second" in (run_folder / "report.html").read_text()


@pytest.mark.slow
def test_a_plan_counts_it(corpus, finished, tmp_path):
    config = job(corpus, tmp_path, finished[0] / "exports" / "teacher")
    learners = demands(config).learners
    names = ["teacher", "teachers/second", "distilbert", "tinybert"]
    assert [one.name for one in learners] == names
    teacher, second, *_ = learners
    assert (second.trained, second.active) == (0, 1.0)
    assert second.forward_flops > 0 == second.backward_flops
    assert second.projection == teacher.projection > 0
    apart = demands_apart(config, learners)
    assert [one.name for one in apart] == names
    of_one = tiny_job(corpus, tmp_path, STEPS)
    alone = demands_apart(of_one, demands(of_one).learners)
    assert alone[-1].forward_flops < apart[-1].forward_flops  # the logits of one, and of two


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["students.tinybert.objective.soft_kl={teacher: wide}"], "soft_kl.teacher: no teacher 'w"),
        (["students.tinybert.objective.hidden_mse={teacher: mean}"], "only terms that compare"),
        (["teachers.second.frozen=false"], "teachers.second.frozen: must be true: only `teacher`"),
        (["teachers.second.init.pretrained=null"], "init.pretrained: must be set if frozen"),
        (["teachers.second.model.vocab_size=700"], "must share a vocabulary (teachers.second)"),
        (
            ["teachers.second.model={vocab_size: 600, mlm_head: false}"],
            "no masked-LM head (teachers.second)",
        ),
        (["teachers.mean={frozen: true, init: {pretrained: x}}"], "teachers.mean: a term means"),
        (
            ["students.tinybert.objective.soft_kl.teacher=teacher"],
            "teachers.second: no learner reads it",
        ),
        (
            ["teachers.second.masked_only=true",
             "students.tinybert.objective.hidden_mse.teacher=second"],
            "hidden_mse: needs more than predictions at masked positions, so teachers.second.mask",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(corpus, finished, tmp_path, overrides, reason):
    with pytest.raises(configs.ConfigError) as failed:
        job(corpus, tmp_path, finished[0] / "exports" / "teacher", *overrides)
    assert reason in str(failed.value)
    assert "\n" not in str(failed.value)


def test_the_mean_of_one_and_a_folder_that_is_not_there_are_refused(corpus, finished, tmp_path):
    with pytest.raises(configs.ConfigError, match=r"soft_kl\.teacher: mean is of several"):
        tiny_job(corpus, tmp_path, MEAN_OF_TWO)
    assert isinstance(job(corpus, tmp_path, finished[0] / "exports" / "teacher"), JobConfig)
    model = finished[0] / "exports" / "teacher" / "model.yaml"
    failed = tandem(
        "train", TINY_JOB, f"data.path={corpus}", f"output_dir={tmp_path}", MEAN_OF_TWO,
        f"teachers.second={{init: {{pretrained: none}}, frozen: true, model: {model}}}",
    )  # fmt: skip
    assert failed.returncode == 1
    assert "teachers.second.init.pretrained: none: no such folder" in one_line(failed.stderr)


def test_a_late_student_of_another_shape_than_its_folder_is_refused_before_the_job_begins(
    corpus, finished, tmp_path
):
    folder = finished[0] / "exports" / "teacher"
    begins = f"students.tinybert.init.pretrained={folder}"
    late = tiny_job(corpus, tmp_path, "students.tinybert.start={step: 5}", begins)
    complaint = rf"students\.tinybert\.model\.hidden_size: is 16, but {folder} has 32; set stud"
    with pytest.raises(TrainingError, match=complaint):
        require_inputs(late)
    fits = tiny_job(
        corpus, tmp_path, begins, f"students.tinybert.model={folder / 'model.yaml'}",
        "students.tinybert.start={step: 5}",
    )  # fmt: skip
    require_inputs(fits)
