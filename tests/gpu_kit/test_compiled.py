"""Compiled layers and losses: they stay so whoever joins or phases begin; a layer's kernels."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import configs
from model import EncoderConfig, MaskedLanguageModel, Padded
from model.precision import kernels_of
from tests.distributed import run_distributed
from tests.trainer import tiny
from trainer.batch_config import StepShape
from trainer.batches import to_micro_batches
from trainer.fusion import fusing
from trainer.learner_names import TEACHER, student_key
from trainer.learners import module
from trainer.learners.learner import Learner
from trainer.learners.module import LearnerModule, is_compiled
from trainer.objectives import ObjectiveConfig
from trainer.objectives.row_losses import RowLosses, cross_entropy_rows, kl_divergence_rows
from trainer.objectives.terms.predictions import SoftKL
from trainer.objectives.terms.states import HiddenMSE
from trainer.step import train_step
from trainer.tasks.pretraining import MaskedLanguageModelling
from trainer.vocabulary_projection import Distribution, TopLogits

STUDENTS, MICRO_BATCH, ACCUMULATION = 3, 2, 2


def compiled_learners(calls):
    """A teacher and students of different widths; runs of compiled functions are counted."""

    def backend(graph, inputs):
        def run(*args):
            calls["compiled"] += 1
            return graph.forward(*args)

        return run

    plain = LearnerModule.compile_parts
    LearnerModule.compile_parts = functools.partialmethod(plain, backend=backend)
    mlm = MaskedLanguageModelling()
    every_step = {0: 1.0, 100: 3.0}  # another value in each step
    soft_kl = SoftKL(weight=every_step, temperature=every_step, min_lead=None)
    student = ObjectiveConfig(mlm=mlm, soft_kl=soft_kl, hidden_mse=HiddenMSE(embedding=False))
    teacher = dataclasses.replace(
        tiny.learner_configs((1, 1, 1))[TEACHER],
        compile=True,
        masked_only=True,
        objective=ObjectiveConfig(mlm=mlm),
    )
    configs = {TEACHER: teacher}
    for number in range(STUDENTS):
        width = 16 * (number + 1)
        configs[student_key(f"s{number}")] = dataclasses.replace(
            teacher,
            masked_only=False,
            model=tiny.encoder(layers=2, hidden_size=width, ffn_size=2 * width),
            objective=student,
        )
    shape = StepShape(tiny.STEPS, tiny.SEED, MICRO_BATCH, ACCUMULATION)
    return [Learner(name, one, teacher.model, shape) for name, one in configs.items()]


def compiled_steps():
    """The compiled functions that each step ran, and each step's compilations; one student joins.

    Then the functions that a step runs without the one that joins, and with it.
    """
    calls = Counter()
    teacher, *students = compiled_learners(calls)
    ran, compilations = [], []
    for step, (length, present) in enumerate(((12, 2), (16, 2), (12, 2), (12, 3), (12, 3))):
        batch = tiny.random_batch(1, MICRO_BATCH * ACCUMULATION)
        batch = dataclasses.replace(
            batch,
            **{
                name: np.ascontiguousarray(getattr(batch, name)[:, :length])
                for name in ("input_ids", "segment_ids", "attention_mask")
            },
        )
        calls.clear()
        torch._dynamo.utils.counters.clear()
        train_step(teacher, students[:present], batch, step)
        ran.append(calls["compiled"])
        compilations.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        for one in (teacher, *students) if step == 0 else ():
            one.evaluate(next(iter(to_micro_batches(batch, MICRO_BATCH, torch.device("cpu")))))
    # Each layer; of the predictions the teacher's distribution, and everybody's losses; each
    # student's states.
    of_teacher, of_student = teacher.config.model.layers + 2, 2 + 1 + 1
    runs = [ACCUMULATION * (of_teacher + number * of_student) for number in (2, 3)]
    return ran, runs, compilations


def test_everything_stays_compiled_over_phases_evaluations_and_joining_students():
    ran, (before, joined), compilations = run_distributed(compiled_steps, 1)[0]
    assert ran == [before] * 3 + [joined] * 2
    assert compilations[0] > compilations[1] > 0
    assert compilations[2] == 0  # a length that was there before the evaluation
    assert compilations[3] > 0 == compilations[4]


def compilations_of_ragged_batches():
    model = MaskedLanguageModel(tiny.encoder(layers=2))
    model.compile_layers(dynamic=True, backend="eager", fullgraph=True)
    compilations = []
    for rows, length in ((3, 8), (4, 9), (2, 16), (5, 11)):
        padded = Padded(torch.full((rows,), 5), 5 * rows)
        model.features(torch.ones(rows, length, dtype=torch.int64), None, padded)
        compilations.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return compilations


@pytest.mark.slow
def test_batches_of_any_length_share_a_compilation():
    compilations = run_distributed(compilations_of_ragged_batches, 1)[0]
    assert compilations == [compilations[0]] * len(compilations)


def compiled_for_any_length():
    """Whether a learner with the corpus' tokenizer is, and one with another."""
    told = []
    LearnerModule.compile_parts = lambda module, dynamic: told.append(dynamic)
    config = dataclasses.replace(tiny.learner_configs((1,) * 3)[TEACHER], compile=True)
    shape = StepShape(tiny.STEPS, tiny.SEED, MICRO_BATCH, ACCUMULATION)
    for tokenizer in (None, "another"):
        learner = dataclasses.replace(config, tokenizer=tokenizer)
        Learner(TEACHER, learner, config.model, shape)
    return told


def test_rows_by_another_tokenizer_have_any_length():
    assert run_distributed(compiled_for_any_length, 1) == [[False, True]]


def one_compilation_too_many():
    model = MaskedLanguageModel(tiny.encoder())
    model.compile_layers(backend="eager")
    torch._dynamo.config.recompile_limit = 1
    for length in (8, 12):
        model.features(torch.ones(1, length, dtype=torch.int64))


def test_the_limit_is_an_error():
    with pytest.raises(AssertionError, match="recompile"):
        run_distributed(one_compilation_too_many, 1)


def fused(model):
    """The kernels of a layer as a GPU is given them, forward and backward, at 32 x 512 in bf16.

    On a machine without CUDA Inductor fuses them as for a CPU, which comes close.
    """
    from benchmarks.roofline_compiled import counting
    from benchmarks.roofline_kernels import Kernels

    kernels = Kernels()
    with FakeTensorMode(allow_non_fake_inputs=True), kernels_of("cuda"):
        config = configs.load(model, EncoderConfig, "model", ["layers=1"]).with_dropout(0.0)
        encoder = MaskedLanguageModel(config).encoder
        encoder.compile_layers(backend=counting(), fullgraph=True, dynamic=False)
        x = torch.empty(32, 512, config.hidden_size, requires_grad=True)
        context = encoder.context(x, None)
        with torch.autocast("cpu", torch.bfloat16), kernels:
            (y,) = encoder.layer(1, x, context)
            forward = len(kernels.all)
            y.backward(torch.empty_like(y))
    return forward, len(kernels.all) - forward


# Of a layer, forward and backward. When a number falls, lower it here.
KERNELS = {"bert_large": (23, 29), "demo_teacher": (25, 29)}


@pytest.mark.parametrize(
    "model", ["bert_large", pytest.param("demo_teacher", marks=pytest.mark.slow)]
)
def test_a_compiled_layer_keeps_to_its_kernels(model):
    assert fused(model) == KERNELS[model]


def test_fused_losses_pass_over_a_chunk_a_third_as_often():
    """Cross-entropy and KL divergence over BERT's vocabulary: the bytes that their kernels move."""
    from benchmarks.roofline_compiled import counting
    from benchmarks.roofline_kernels import Kernels

    kernels, rows, vocabulary = Kernels(), 1216, 30522
    with FakeTensorMode(allow_non_fake_inputs=True), kernels_of("cuda"), kernels:
        bias, weights = torch.empty(vocabulary), torch.ones(rows)
        product = torch.empty(rows, vocabulary + 6, dtype=torch.bfloat16)
        teacher = Distribution(TopLogits(torch.empty(rows, vocabulary), None, vocabulary))
        teacher.at(slice(0, rows), 2.0)
        losses = [
            cross_entropy_rows(torch.zeros(rows, dtype=torch.int64)),
            kl_divergence_rows(teacher, 2.0, weights),
        ]
        together = RowLosses(losses, [1.0, 2.0])
        begins = [len(kernels.all)]
        together.differentiate(product[:, :vocabulary].float() + bias, slice(0, rows))
        begins.append(len(kernels.all))
        with fusing({"backend": counting(), "dynamic": False}):
            together.differentiate_products(product, bias, slice(0, rows), 1.0)
    plain = sum(kernel.bytes for kernel in kernels.all[begins[0] : begins[1]])
    assert 3 * sum(kernel.bytes for kernel in kernels.all[begins[1] :]) < plain


@pytest.mark.parametrize(
    ("wanted", "stage", "device", "has_triton", "compiled"),
    [
        (None, 2, "cuda", True, True),
        (None, 2, "cuda", False, False),
        (None, 3, "cuda", True, False),
        (None, 2, "cpu", True, False),
        (False, 2, "cuda", True, False),
        (True, 2, "cpu", False, True),
    ],
)
def test_layers_are_compiled_on_gpus(monkeypatch, wanted, stage, device, has_triton, compiled):
    monkeypatch.setattr(module, "has_generator", lambda device: has_triton)
    config = dataclasses.replace(tiny.learner_configs((1,) * 3)[TEACHER], compile=wanted)
    config = dataclasses.replace(config, zero_stage=stage)
    assert is_compiled(config, torch.device(device)) == compiled


@pytest.mark.parametrize("lacking", ["", "triton", "compiler", "headers"])
def test_triton_needs_a_compiler_and_the_headers_of_python(monkeypatch, tmp_path, lacking):
    """A GPU node with Debian's own Python, and gcc, has no Python.h: nothing would be compiled."""
    if lacking != "headers":
        (tmp_path / "Python.h").touch()
    monkeypatch.setattr(module, "find_spec", lambda name: None if lacking == "triton" else name)
    monkeypatch.setattr(module.sysconfig, "get_path", lambda *_: str(tmp_path))
    monkeypatch.setattr(module.shutil, "which", lambda name: lacking != "compiler" or None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delenv("CC", raising=False)
    assert module.has_generator(torch.device("cuda", 0)) == (not lacking)
