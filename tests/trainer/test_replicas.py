"""Replicas that must be equal on all ranks: a single flipped bit is found, and its rank named."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_distributed
from tests.trainer import tiny
from trainer.checkpoint.layout import torch_optimizer
from trainer.step import train_step
from trainer.watch.ranks import DivergenceError, minority, verify

RANKS, FAULTY = 3, 1
NAMES = ("teacher", "students/distilbert", "students/tinybert")


def flip(tensor: torch.Tensor) -> None:
    """Flip the lowest bit of the first element on one rank; a second call undoes it."""
    if dist.get_rank() == FAULTY:
        tensor.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


def complaint(engines) -> str:
    try:
        verify(engines, 7)
    except DivergenceError as error:
        return str(error)
    return ""


def look_for_flipped_bits(stages: tuple[int, int, int]) -> dict[str, str]:
    """The messages for intact engines, and for each engine with one flipped bit in its replicas."""
    learners = tiny.learners(stages, 1, 1)
    for step in range(2):
        batch = tiny.my_rows(tiny.random_batch(step, rows=RANKS))
        train_step(learners[0], learners[1:], batch, step)
    engines = {learner.name: learner.engine for learner in learners}
    said = {"sound": complaint(engines)}
    for stage, (name, engine) in zip(stages, engines.items(), strict=True):
        weights = [p for p in engine.module.parameters() if p.numel()]
        flip(weights[-1])
        said[f"{name} weights"] = complaint(engines)
        flip(weights[-1])
        if stage == 0:
            state = torch_optimizer(engine).state[weights[0]]["exp_avg_sq"]
            flip(state)
            said[f"{name} optimizer state"] = complaint(engines)
            flip(state)
    return {**said, "mended": complaint(engines)}


@pytest.mark.parametrize("stages", [(0, 1, 3), pytest.param((2, 3, 0), marks=pytest.mark.slow)])
def test_one_flipped_bit_is_found_and_named_at_every_stage(stages):
    for said in run_distributed(look_for_flipped_bits, RANKS, stages):
        assert said.pop("sound") == said.pop("mended") == ""
        assert len(said) == 4
        for fault, line in said.items():
            learner, _, what = fault.partition(" ")
            pattern = rf"step 7: {learner}: the {what} of rank {FAULTY} on \S+ differ from those of"
            assert re.match(pattern, line), (fault, line)


@pytest.mark.parametrize(
    ("sums", "ranks"),
    [
        ([5, 5], []),
        ([5, 6], [0, 1]),
        ([5, 5, 6], [2]),
        ([6, 5, 5, 5], [0]),
        ([5, 6, 5, 6], [0, 1, 2, 3]),
        ([5, 6, 7], [0, 1, 2]),
        ([5, 6, 5, 7, 5], [1, 3]),
    ],
)
def test_the_majority_decides_which_rank_is_wrong(sums, ranks):
    assert minority(sums) == ranks
