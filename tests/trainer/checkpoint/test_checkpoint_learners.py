"""Learners with any optimizer and precision resume exactly on other ranks and at other stages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from configs.kinds import kinds_of
from tests.distributed import run_distributed
from tests.thorough import IS_THOROUGH
from tests.trainer import tiny
from tests.trainer.checkpoint.learners import digest
from trainer.batch_config import StepShape
from trainer.checkpoint.folder import Retention
from trainer.checkpoint.layout import full_state_dict, layout, torch_optimizer
from trainer.checkpoint.reader import Checkpoint
from trainer.checkpoint.writer import CheckpointWriter
from trainer.learner_names import TEACHER, student_key
from trainer.learners.learner import Learner
from trainer.learners.module import WORD_EMBEDDING
from trainer.learners.state import LearnerState
from trainer.optimizers.config import ExponentialAverage, OptimizerConfig, optimizer_config
from trainer.optimizers.gated import LossScaleConfig
from trainer.step import train_step

ROWS = 12 if IS_THOROUGH else 4
SAVED_AT, END = (4, 7) if IS_THOROUGH else (2, 4)
INITIAL_SCALE = 2.0 ** (22 if IS_THOROUGH else 20)  # float16 overflows before the save
TOLERANCES = {"fp32": 1e-6, "fp16": 1e-3, "bf16_weights": 1e-3, "fp8": 1e-3}
OFFLOAD = ("none", "optimizer", "optimizer", "parameters")  # the most there is at each stage


@dataclass(frozen=True)
class Way:
    """The options with which a learner is trained."""

    optimizer: str = "adamw"
    precision: str = "fp32"
    offload: bool = False
    average: bool = False
    original: bool = False  # Adam without bias correction, and position embeddings that stay


WAYS = {
    **{kind: Way(kind) for kind in kinds_of(OptimizerConfig)},
    "fp16": Way("lamb", "fp16"),
    "bf16_weights": Way("adamw", "bf16_weights", average=True),
    "bf16_weights muon": Way("muon", "bf16_weights", offload=True),
    "fp8": Way("adamw", "fp8"),
    "offload": Way("adamw", offload=True),
    "original": Way("adamw", original=True),
}
Placed = tuple[str, int]  # the name of a way, and the stage
QUICK: list[Placed] = [
    *(("adamw", 1), ("lamb", 3), ("muon", 2)),
    *(("fp16", 0), ("offload", 2), ("bf16_weights", 0), ("bf16_weights muon", 2)),
]
EVERYTHING: list[Placed] = [(way, stage) for way in WAYS for stage in range(4)]


def start(way: str, stage: int, seed: int) -> Learner:
    """A learner that minimises its own losses only; its initial weights depend on the seed."""
    how = WAYS[way]
    config = dataclasses.replace(
        tiny.learner_configs((0, 0, 0))[TEACHER],
        optimizer=optimizer_config(
            how.optimizer,
            learning_rate=1e-3,
            **({"bias_correction": False} if how.original else {}),
        ),
        average=ExponentialAverage() if how.average else None,
        freeze_positions=how.original,
        precision=how.precision,
        loss_scale=LossScaleConfig(initial=INITIAL_SCALE, growth_interval=3),
        gradient_clipping=0.5,
        zero_stage=stage,
        offload=OFFLOAD[stage] if how.offload else "none",
    )
    # One row at a time everywhere: where float16 overflows depends on how many it adds up.
    step_shape = StepShape(tiny.STEPS, seed, 1, ROWS // dist.get_world_size())
    return Learner(student_key(way), config, config.model, step_shape)


def train(learner: Learner, first: int, last: int) -> list[float]:
    """Run steps ``[first, last)``; returns their losses."""
    batches = [tiny.my_rows(tiny.random_batch(step, ROWS)) for step in range(first, last)]
    return [
        train_step(learner, [], batch, step).losses[learner.name]
        for step, batch in enumerate(batches, first)
    ]


def outcome(learner: Learner) -> dict[str, Any]:
    """The next losses, and the learner's state afterwards."""
    losses = train(learner, SAVED_AT, END)
    weights = digest(full_state_dict(learner.engine))
    return {"losses": losses, "weights": weights, "counters": learner.counters}


def save(folder: Path, placed: Sequence[Placed]) -> dict[Placed, Any]:
    """Train them, save them together, and keep training."""
    learners = {(way, stage): start(way, stage, tiny.SEED) for way, stage in placed}
    for learner in learners.values():
        train(learner, 0, SAVED_AT)
    counters = {key(one): dataclasses.asdict(learners[one].counters) for one in placed}
    engines = {key(one): learner.engine for one, learner in learners.items()}
    CheckpointWriter(folder, Retention()).save(SAVED_AT, engines, counters, wait=True)
    return {one: outcome(learner) for one, learner in learners.items()}


def resume(folder: Path, moves: Sequence[tuple[Placed, int]]) -> list[dict[str, Any]]:
    """Resume each of them at another stage, from other initial weights."""
    checkpoint = Checkpoint(folder, SAVED_AT)
    outcomes = []
    for (way, stage), to in moves:
        learner = start(way, to, seed=tiny.SEED + 1)
        saved = checkpoint.trainer_state[key((way, stage))]
        learner.counters = LearnerState.from_json(saved)
        checkpoint.load(key((way, stage)), learner.engine)
        outcomes.append(outcome(learner))
    return outcomes


def key(placed: Placed) -> str:
    way, stage = placed
    return student_key(f"{way}-{stage}")


def assert_goes_on(
    saved: dict[Placed, Any], moves: Sequence[tuple[Placed, int]], resumed: list[Any]
) -> None:
    for (placed, to), found in zip(moves, resumed, strict=True):
        expected, tolerance = saved[placed], TOLERANCES[WAYS[placed[0]].precision]
        for ours, theirs in zip(found["losses"], expected["losses"], strict=True):
            assert math.isclose(ours, theirs, rel_tol=tolerance), (placed, to)
        for counter in ("loss_scale", "overflows", "skipped_steps"):
            ours, theirs = (getattr(one["counters"], counter) for one in (found, expected))
            assert ours == theirs, (placed, to)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learners")


def save_and_resume(folder: Path) -> tuple[dict[Placed, Any], list[dict[str, Any]]]:
    """The outcomes of the saved learners, and of those that continued without a save."""
    return save(folder, QUICK), resume(folder, [(placed, placed[1]) for placed in QUICK])


@pytest.fixture(scope="module")
def saved(folder: Path) -> tuple[dict[Placed, Any], list[dict[str, Any]]]:
    return run_distributed(save_and_resume, 2, folder)[0]


def test_on_the_same_ranks_and_stages_they_are_the_same_to_the_bit(
    saved: tuple[dict[Placed, Any], list[dict[str, Any]]],
) -> None:
    undisturbed, resumed = saved
    assert resumed == [undisturbed[placed] for placed in QUICK]
    assert undisturbed["fp16", 0]["counters"].overflows


def test_on_one_rank_at_other_stages_they_go_on_alike(
    saved: tuple[dict[Placed, Any], list[dict[str, Any]]], folder: Path
) -> None:
    moves = [(placed, (placed[1] + 1) % 4) for placed in QUICK]
    assert_goes_on(saved[0], moves, run_distributed(resume, 1, folder, moves)[0])


def resume_with_adamw(folder: Path, name: str) -> list[tuple[bool, set[str], list[float]]]:
    """At each stage: whether its weights are those of a learner that Muon trained, which states
    AdamW resumes with for its word embedding, and the next losses.
    """
    checkpoint, results = Checkpoint(folder, SAVED_AT), []
    for stage in range(4):
        learner = start("adamw", stage, seed=tiny.SEED + 1)
        checkpoint.load(name, learner.engine)
        optimizer, pieces = torch_optimizer(learner.engine), layout(learner.engine)
        assert optimizer is not None
        (holder,) = (piece.holder for piece in pieces if piece.name == f"model.{WORD_EMBEDDING}")
        weights = full_state_dict(learner.engine), checkpoint.master_weights(name)
        states = {*optimizer.state[holder]}
        losses = train(learner, SAVED_AT, END)
        results.append((digest(weights[0]) == digest(weights[1]), states, losses))
    return results


def test_at_every_stage_another_optimizer_begins_anew_or_with_the_states_that_it_knows(
    saved: tuple[dict[Placed, Any], list[dict[str, Any]]], folder: Path
) -> None:
    (first, *others) = run_distributed(resume_with_adamw, 1, folder, key(("muon", 2)))[0]
    assert first[:2] == (True, {"step", "exp_avg", "exp_avg_sq"})
    for weights, states, losses in others:  # beside the layers' matrices, which have none of these
        assert (weights, states) == (True, set())
        assert all(map(math.isfinite, losses))


@pytest.mark.slow
@pytest.mark.skipif(ROWS % 3 > 0, reason="only the rows of a thorough run divide by 3 ranks")
@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (2, 4), (4, 3)])
def test_any_stage_to_any_stage_on_any_number_of_ranks(
    tmp_path: Path, first: int, second: int
) -> None:
    saved = run_distributed(save, first, tmp_path, EVERYTHING, time_limit=1800)[0]
    moves = [(placed, to) for placed in EVERYTHING for to in range(4)]
    resumed = run_distributed(resume, second, tmp_path, moves, time_limit=1800)[0]
    assert_goes_on(saved, moves, resumed)
