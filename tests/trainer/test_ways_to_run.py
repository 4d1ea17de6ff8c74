"""Options that change a learner's speed and memory, but neither losses nor gradients."""

from __future__ import annotations

import dataclasses
import functools
import shutil

import pytest
import torch

import configs
from model import encoder
from tests.distributed import run_distributed
from tests.trainer import tiny
from trainer.batch_config import StepShape
from trainer.batches import to_device
from trainer.config import JobConfig
from trainer.learner_names import TEACHER, student_key
from trainer.learners.learner import Learner
from trainer.learners.module import LearnerModule, Train, build_module
from trainer.objectives import ObjectiveConfig
from trainer.objectives.objective import union
from trainer.objectives.terms.predictions import SoftKL
from trainer.step import train_step
from trainer.tasks.pretraining import MaskedLanguageModelling
from trainer.teacher_outputs import OutputProjection, detach

STEPS = 3


def full_batch(**changes):
    """The first step in plain torch: one process, the whole batch, no DeepSpeed.

    `changes` are applied to every learner's config.
    """
    configs = tiny.learner_configs((0, 0, 0))
    teacher_config = configs[TEACHER].model
    modules = {
        name: build_module(name, dataclasses.replace(config, **changes), teacher_config, tiny.SEED)
        for name, config in configs.items()
    }
    batch = tiny.random_batch(0)
    totals = tiny.totals_of(batch)
    micro = to_device(batch, torch.device("cpu"))
    teacher = modules[TEACHER]
    capture = union(module.objective.source_capture(0) for module in modules.values())
    loss, _, features = teacher(Train(totals, {}, capture), micro)
    loss.backward()
    losses = {TEACHER: loss.item()}
    teacher_outputs = detach(
        features, OutputProjection(*(p.detach() for p in teacher.model.output_projection()))
    )
    sources = {TEACHER: teacher_outputs}
    for name, module in list(modules.items())[1:]:
        loss, _, _ = module(Train(totals, sources, module.objective.student_capture(0)), micro)
        loss.backward()
        losses[name] = loss.item()
    gradients = {
        name: {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        for name, module in modules.items()
    }
    return gradients, losses


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_checkpointed_activations_change_no_bit_of_any_gradient(dropout):
    found = []
    for way in (False, True):
        torch.manual_seed(1)
        found.append(full_batch(dropout=dropout, checkpoint_activations=way)[0])
    kept, again = found
    assert kept.keys() == again.keys()
    for name, of_learner in kept.items():
        assert of_learner.keys() == again[name].keys()
        for parameter, gradient in of_learner.items():
            assert torch.equal(gradient, again[name][parameter]), (name, parameter)


def curves(learner_configs):
    """The losses of the teacher and its students over a few steps."""
    step_shape = StepShape(STEPS, tiny.SEED, 4, 1)
    teacher = learner_configs[TEACHER].model
    teacher, *students = (
        Learner(name, config, teacher, step_shape) for name, config in learner_configs.items()
    )
    batches = [tiny.my_rows(tiny.random_batch(step)) for step in range(STEPS)]
    return [train_step(teacher, students, b, step).losses for step, b in enumerate(batches)]


def pair(stage, teacher_ways, student_ways):
    """A teacher and a student of its predictions at masked positions, with these options."""
    found = tiny.learner_configs((stage, stage, stage))
    mlm, student = MaskedLanguageModelling(), student_key("distilbert")
    return {
        TEACHER: dataclasses.replace(
            found[TEACHER], objective=ObjectiveConfig(mlm=mlm), **teacher_ways
        ),
        student: dataclasses.replace(
            found[student], objective=ObjectiveConfig(mlm=mlm, soft_kl=SoftKL()), **student_ways
        ),
    }


def whole_and_masked_only():
    """At two stages: the losses both ways, and how often a layer computed some rows only."""
    narrowed, at_rows = [], encoder.at_rows
    encoder.at_rows = lambda x, rows: narrowed.append(rows) or at_rows(x, rows)
    found = []
    for stage in (0, 3):
        for way in (False, True):
            narrowed.clear()
            losses = curves(pair(stage, {"masked_only": way}, {}))
            found.append((losses, len(narrowed)))
    return found[:2], found[2:]


@pytest.mark.slow
def test_a_teachers_last_layer_of_masked_positions_learns_the_same():
    for (whole, narrowed), (masked_only, more) in run_distributed(whole_and_masked_only, 2)[0]:
        assert more == 2 * narrowed > 0  # the student's, and the teacher's too
        assert_same(whole, masked_only)


def compiled_and_not(stage, backend):
    if backend != "inductor":
        kept = LearnerModule.compile_parts
        LearnerModule.compile_parts = functools.partialmethod(kept, backend=backend)
    plain = curves(pair(stage, {}, {}))
    torch._dynamo.utils.counters.clear()
    compiled = curves(pair(stage, {"compile": True}, {"compile": True}))
    return plain, compiled, torch._dynamo.utils.counters["frames"]["ok"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "stage"), [("aot_eager", 0), pytest.param("inductor", 2, marks=pytest.mark.slow)]
)
def test_compiled_layers_and_losses_learn_the_same(backend, stage):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    plain, compiled, frames = run_distributed(compiled_and_not, 1, stage, backend)[0]
    assert frames > 0
    assert_same(plain, compiled)


def assert_same(one, other):
    for losses, again in zip(one, other, strict=True):
        assert again == pytest.approx(losses, rel=1e-5)


def job(*overrides):
    return configs.load("demo", JobConfig, "job", list(overrides))


def test_the_keys_reach_a_learner_from_the_job():
    ways = [f"students.tinybert.{key}=true" for key in ("checkpoint_activations", "compile")]
    off = ["distilbert.objective.cosine", "tinybert.objective.hidden_mse",
           "tinybert.objective.attention_mse"]  # fmt: skip
    found = job(*ways, "teacher.masked_only=true", *(f"students.{term}=null" for term in off))
    assert found.students["tinybert"].checkpoint_activations
    assert found.students["tinybert"].compile
    assert found.teacher.masked_only
    pairs = ["data.packing=segment_pair", "students.tinybert.model.pooler=tanh"]
    off = [f"students.{term}=null" for term in off]
    whole = job("teacher.masked_only=true", *off, *pairs, "students.tinybert.objective.nsp={}")
    assert whole.students["tinybert"].architecture.pair_head


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["teacher.masked_only=true"], "students.distilbert.objective.cosine: needs more than"),
        (["students.tinybert.masked_only=true"], "students.tinybert.masked_only: is for the"),
        (["teacher.compile=true", "teacher.zero_stage=3"], "compile: must be false at zero_stage"),
        (
            ["teacher.frozen=true", "teacher.init.pretrained=x", "teacher.objective=null",
             "teacher.optimizer=null", "teacher.schedule=null", "teacher.zero_stage=0",
             "teacher.checkpoint_activations=true"],
            "checkpoint_activations: is for training",
        ),
    ],
)  # fmt: skip
def test_keys_that_cannot_be_meant(overrides, message):
    with pytest.raises(configs.ConfigError, match=message):
        job(*overrides)
