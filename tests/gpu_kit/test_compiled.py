"""With `compile: true`, layers stay compiled whichever learners join or phases begin."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import numpy as np
import pytest
import torch

from model import MaskedLanguageModel
from tests.distributed import run_distributed
from tests.trainer import tiny
from trainer.batches import to_micro_batches
from trainer.learner_names import TEACHER, student_key
from trainer.learners.learner import Learner
from trainer.learners.step_shape import StepShape
from trainer.objectives import ObjectiveConfig
from trainer.objectives.terms import SoftKL
from trainer.step import train_step
from trainer.tasks.masked_language_modelling import MaskedLanguageModelling

STUDENTS, MICRO_BATCH, ACCUMULATION = 4, 2, 2


def compiled_learners(calls):
    """A teacher and students of different widths; runs of each compiled half are counted."""

    def backend(graph, inputs):
        def run(*args):
            calls["compiled"] += 1
            return graph.forward(*args)

        return run

    plain = MaskedLanguageModel.compile_layers
    MaskedLanguageModel.compile_layers = functools.partialmethod(plain, backend=backend)
    mlm = MaskedLanguageModelling()
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
            objective=ObjectiveConfig(mlm=mlm, soft_kl=SoftKL()),
        )
    shape = StepShape(tiny.STEPS, tiny.SEED, MICRO_BATCH, ACCUMULATION)
    return [Learner(name, one, teacher.model, shape) for name, one in configs.items()]


def compiled_halves():
    """The halves of layers that ran compiled in each step, and the number of all halves."""
    calls = Counter()
    teacher, *students = compiled_learners(calls)
    halves = sum(2 * one.config.model.layers * ACCUMULATION for one in (teacher, *students))
    found = []
    for step, length in enumerate((12, 16)):
        batch = tiny.random_batch(1, MICRO_BATCH * ACCUMULATION)
        batch = dataclasses.replace(
            batch,
            **{
                name: np.ascontiguousarray(getattr(batch, name)[:, :length])
                for name in ("input_ids", "segment_ids", "attention_mask")
            },
        )
        calls.clear()
        train_step(teacher, students, batch, step)
        found.append(calls["compiled"])
        for one in (teacher, *students) if step == 0 else ():
            one.evaluate(next(iter(to_micro_batches(batch, MICRO_BATCH, torch.device("cpu")))))
    return found, halves


def test_every_half_of_a_layer_stays_compiled_over_phases_and_evaluations():
    found, halves = run_distributed(compiled_halves, 1)[0]
    assert found == [halves] * len(found)


def one_compilation_too_many():
    model = MaskedLanguageModel(tiny.encoder())
    model.compile_layers(backend="eager")
    torch._dynamo.config.recompile_limit = 1
    for length in (8, 12):
        model.features(torch.ones(1, length, dtype=torch.int64))


def test_the_limit_is_an_error():
    with pytest.raises(AssertionError, match="recompile"):
        run_distributed(one_compilation_too_many, 1)
