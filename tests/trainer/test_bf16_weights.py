"""Weights in bfloat16 with float32 masters: the same update at every stage, and what is bfloat16.

Gradients on several ranks, resumption, memory and budgets: the tests of those things.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from configs.kinds import kinds_of
from model import Capture
from tests.distributed import run_distributed
from tests.trainer import tiny
from trainer.batch_config import StepShape
from trainer.batches import to_micro_batches
from trainer.checkpoint.layout import full_state_dict
from trainer.learner_names import TEACHER, student_key
from trainer.learners.first_weights import from_layers
from trainer.learners.learner import Learner
from trainer.learners.module import Predict, build_module
from trainer.optimizers.config import ExponentialAverage, OptimizerConfig, optimizer_config
from trainer.step import train_step

ROWS, STEPS = 4, 3
KINDS = kinds_of(OptimizerConfig)
EXACT = ("adamw", "adamax", "adadelta", "muon")  # kinds that read no norm of whole parameters
PLACES = [(stage, False) for stage in range(4)] + [(2, True)]  # stages, and whether offloaded


def masters_after(kind: str, stage: int, offload: bool) -> dict[str, torch.Tensor]:
    """The masters after steps in which all ranks read the same rows.

    Norms are rounded differently where ranks add up their parts. So kinds that read some take one
    step: in the next, other weights would be rounded to other bfloat16 numbers.
    """
    config = dataclasses.replace(
        tiny.learner_configs((stage,) * 3)[TEACHER],
        precision="bf16_weights",
        optimizer=optimizer_config(kind, learning_rate=1e-2),
        gradient_clipping=0.0,
        offload="optimizer" if offload else "none",
    )
    shape = StepShape(tiny.STEPS, tiny.SEED, ROWS // 2, 2)
    learner = Learner(TEACHER, config, config.model, shape)
    for step in range(STEPS if kind in EXACT else 1):
        train_step(learner, [], tiny.random_batch(step, ROWS), step)
    return full_state_dict(learner.engine)


def masters_of(ways: list[tuple[str, int, bool]]) -> list[dict[str, torch.Tensor]]:
    return [masters_after(*way) for way in ways]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds", [["adamw", "stableadamw"], pytest.param(KINDS, marks=pytest.mark.slow)]
)
def test_equal_gradients_give_the_same_masters_at_every_stage(kinds):
    """Two ranks that read the same rows have the gradients of one."""
    # With AVX-512, products in bfloat16 are rounded by a weight's layout, which ZeRO 3 changes.
    is_rounded_alike = torch.backends.cpu.get_cpu_capability() != "AVX512"
    places = [place for place in PLACES if place[0] < 3 or is_rounded_alike]
    ways = [(kind, *place) for kind in kinds for place in places]
    (alone,) = run_distributed(masters_of, 1, [(kind, 0, False) for kind in kinds])
    both, _ = run_distributed(masters_of, 2, ways)
    expected = dict(zip(kinds, alone, strict=True))
    for (kind, *where), masters in zip(ways, both, strict=True):
        tolerance = 0.0 if kind in EXACT else 1e-6
        for name, master in masters.items():
            same = torch.allclose(master, expected[kind][name], rtol=tolerance, atol=tolerance / 10)
            assert same, (kind, where, name)


def test_masters_begin_with_the_weights_to_the_last_bit_and_are_rounded_for_the_model():
    for found in run_distributed(first_weights, 2):
        assert found == [(True, True, {torch.bfloat16})] * 4


def first_weights() -> list[tuple[bool, bool, set[torch.dtype]]]:
    """By stage: whether masters equal the weights, and parameters are those; dtypes of states."""
    found = []
    for stage in range(4):
        config = dataclasses.replace(
            tiny.learner_configs((stage,) * 3)[TEACHER], precision="bf16_weights"
        )
        exact = dict(build_module(TEACHER, config, config.model, tiny.SEED).named_parameters())
        learner = Learner(TEACHER, config, config.model, StepShape(tiny.STEPS, tiny.SEED, ROWS, 1))
        masters = full_state_dict(learner.engine)
        begun = all(torch.equal(masters[name], exact[name]) for name in exact)
        batch = next(iter(to_micro_batches(tiny.random_batch(0, ROWS), ROWS, learner.device)))
        layers = tuple(range(config.model.layers + 1))
        with torch.no_grad():
            states = learner.engine(Predict(Capture(hidden_states=layers)), batch).hidden_states
        found.append((begun, is_rounded(learner, exact), {x.dtype for x in states.values()}))
    return found


def is_rounded(learner: Learner, exact: dict[str, torch.Tensor]) -> bool:
    import deepspeed

    parameters = dict(learner.engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return all(torch.equal(parameters[n], exact[n].bfloat16()) for n in exact)


def test_the_mean_of_the_weights_is_that_of_the_masters():
    assert run_distributed(mean_and_masters, 1)[0]


def mean_and_masters() -> bool:
    config = dataclasses.replace(
        tiny.learner_configs((0,) * 3)[TEACHER],
        precision="bf16_weights",
        average=ExponentialAverage(decay=0.0),
    )
    learner = Learner(TEACHER, config, config.model, StepShape(tiny.STEPS, tiny.SEED, ROWS, 1))
    train_step(learner, [], tiny.random_batch(0, ROWS), 0)
    masters = full_state_dict(learner.engine)
    with learner.averaged():
        means = full_state_dict(learner.engine)
        live = dict(learner.engine.module.named_parameters())
        rounded = all(torch.equal(live[name], means[name].bfloat16()) for name in live)
    again = full_state_dict(learner.engine)
    return rounded and all(
        torch.equal(masters[name], means[name]) and torch.equal(masters[name], again[name])
        for name in masters
    )


def test_a_student_begins_with_the_masters_of_its_teacher_s_layers():
    assert run_distributed(copied_layers, 1)[0]


def copied_layers() -> bool:
    config = dataclasses.replace(tiny.learner_configs((1,) * 3)[TEACHER], precision="bf16_weights")
    shape = StepShape(tiny.STEPS, tiny.SEED, ROWS, 1)
    teacher = Learner(TEACHER, config, config.model, shape)
    train_step(teacher, [], tiny.random_batch(0, ROWS), 0)
    weights = from_layers("students.half", teacher, [1, 3])
    student = Learner(student_key("half"), config.with_layers(2), config.model, shape, 1, weights)
    masters = full_state_dict(student.engine)
    return all(torch.equal(masters[f"model.{name}"], weights[name]) for name in weights)
