"""Checkpoints resume on any number of ranks and at any ZeRO stage; on the same ones bit for bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from safetensors import safe_open

from tests.distributed import run_distributed
from tests.trainer.checkpoint.learners import Kind, digest, start, train
from trainer.checkpoint import manifest
from trainer.checkpoint.folder import Retention
from trainer.checkpoint.layout import full_state_dict
from trainer.checkpoint.reader import Checkpoint, newest_intact
from trainer.checkpoint.writer import CheckpointWriter
from trainer.errors import CheckpointError

SAVED_AT, END = 3, 7
STAGES = {"teacher": 0, "students/one": 1, "students/two": 2, "students/three": 3}


def save_unit(folder: Path) -> dict[str, Any]:
    """Train four learners at four stages, save them together, and keep training meanwhile.

    Afterwards new engines resume from there, on the same ranks at the same stages.
    """
    synchronous = CheckpointWriter(folder / "synchronous", Retention())
    asynchronous = CheckpointWriter(folder / "asynchronous", Retention())
    engines = {name: start(Kind(stage)) for name, stage in STAGES.items()}
    before = {name: train(engine, 0, SAVED_AT) for name, engine in engines.items()}
    weights = {name: full_state_dict(engine) for name, engine in engines.items()}
    synchronous.save(SAVED_AT, engines, {"tokens": 5}, wait=True)
    asynchronous.save(SAVED_AT, engines, {"tokens": 5})
    after = {name: train(engine, SAVED_AT, END) for name, engine in engines.items()}
    assert asynchronous.wait()
    ends = {name: digest(full_state_dict(engine)) for name, engine in engines.items()}
    same = resume(folder, {name: [stage] for name, stage in STAGES.items()})
    return {"before": before, "weights": weights, "after": after, "ends": ends, "same": same}


def resume(folder: Path, stage_of: dict[str, list[int]]) -> dict[tuple[str, int], Any]:
    """Resume every learner at each of its stages, into engines with other weights."""
    checkpoint = newest_intact(folder / "asynchronous", print, dist.group.WORLD)
    assert checkpoint is not None
    results: dict[tuple[str, int], Any] = {}
    for name, stages in stage_of.items():
        for stage in stages:
            engine = start(Kind(stage), seed=1)
            checkpoint.load(name, engine)
            loaded = digest(full_state_dict(engine))
            losses = train(engine, SAVED_AT, END)
            end = digest(full_state_dict(engine))
            results[name, stage] = {"loaded": loaded, "losses": losses, "end": end}
    return results


def refuse_other_shapes(folder: Path) -> None:
    """A learner of another width is refused and not changed."""
    engine = start(Kind(1), hidden=8)
    before = digest(full_state_dict(engine))
    with pytest.raises(CheckpointError, match=r"teacher: down\.bias has shape \[8\]"):
        Checkpoint(folder / "asynchronous", SAVED_AT).load("teacher", engine)
    assert digest(full_state_dict(engine)) == before


def keep_own_settings(folder: Path) -> None:
    """Learning rate, decay, … are configuration: each group keeps its own settings."""
    for stage in (0, 1, 3):
        engine = start(Kind(stage), seed=1, learning_rate=0.5)
        groups = engine.optimizer.param_groups
        for group in groups:
            group["weight_decay"] += 0.3
        before = [{**group, "params": None} for group in groups]
        Checkpoint(folder / "asynchronous", SAVED_AT).load("teacher", engine)
        assert [{**group, "params": None} for group in groups] == before


def resume_shifted(folder: Path, shift: int) -> dict[tuple[str, int], Any]:
    refuse_other_shapes(folder)
    keep_own_settings(folder)
    return resume(folder, {name: [(stage + shift) % 4] for name, stage in STAGES.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elastic")


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[str, Any]:
    return run_distributed(save_unit, 2, folder)[0]


def close(losses: list[float], expected: list[float]) -> bool:
    return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(losses, expected, strict=True))


def test_training_goes_on_unharmed_and_async_files_equal_sync_files(
    saved: dict[str, Any], folder: Path
) -> None:
    one = Checkpoint(folder / "synchronous", SAVED_AT)._manifest
    other = Checkpoint(folder / "asynchronous", SAVED_AT)._manifest
    assert one == other
    assert saved["before"]["teacher"] != saved["after"]["teacher"]


def test_master_weights_are_read_without_an_engine(saved: dict[str, Any], folder: Path) -> None:
    checkpoint = Checkpoint(folder / "asynchronous", SAVED_AT)
    assert checkpoint.learners == list(STAGES)
    assert checkpoint.trainer_state == {"tokens": 5}
    for name, weights in saved["weights"].items():
        read = checkpoint.master_weights(name)
        assert digest(read) == digest(weights)
        assert {key: tensor.shape for key, tensor in read.items()} == {
            key: tensor.shape for key, tensor in weights.items()
        }
        assert "seen" in read
        assert "passing" not in read


def test_same_ranks_and_stages_are_bit_identical(saved: dict[str, Any]) -> None:
    for name, stage in STAGES.items():
        assert saved["same"][name, stage]["losses"] == saved["after"][name]
        assert saved["same"][name, stage]["end"] == saved["ends"][name]


@pytest.mark.parametrize(
    ("world_size", "shift"), [(3, 2), pytest.param(1, 1, marks=pytest.mark.slow)]
)
def test_other_ranks_and_stages_continue_the_losses(
    saved: dict[str, Any], folder: Path, world_size: int, shift: int
) -> None:
    resumed = run_distributed(resume_shifted, world_size, folder, shift)[0]
    for (name, _), result in resumed.items():
        assert result["loaded"] == digest(saved["weights"][name])
        assert close(result["losses"], saved["after"][name])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_stage_to_every_stage(saved: dict[str, Any], folder: Path, world_size: int) -> None:
    stages = {name: [0, 1, 2, 3] for name in STAGES}
    resumed = run_distributed(resume, world_size, folder, stages)[0]
    for (name, _), result in resumed.items():
        assert close(result["losses"], saved["after"][name])


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(1, 2), (4, 3), (3, 4)])
def test_sizes_other_than_two_to_others(tmp_path: Path, first: int, second: int) -> None:
    saved = run_distributed(save_unit, first, tmp_path)[0]
    stages = {name: [0, 1, 2, 3] for name in STAGES}
    resumed = run_distributed(resume, second, tmp_path, stages)[0]
    for (name, _), result in resumed.items():
        assert close(result["losses"], saved["after"][name])


def test_a_step_that_is_not_there_is_named_with_those_that_are(
    saved: dict[str, Any], folder: Path
) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of step 5; there are: 3"):
        Checkpoint(folder / "asynchronous", 5)
    with pytest.raises(CheckpointError, match="no learner 'students/four', only teacher"):
        Checkpoint(folder / "asynchronous", 3).master_weights("students/four")


def opened_to_resume(folder: Path, stage: int) -> int:
    """The number of tensor files that this rank opens to resume a learner."""
    engine = start(Kind(stage), seed=1)
    opened: list[Any] = []
    checkpoint = Checkpoint(folder / "asynchronous", SAVED_AT)
    watched = mock.patch.object(
        manifest, "safe_open", side_effect=lambda *file: opened.append(file) or safe_open(*file)
    )
    with watched:
        checkpoint.load("teacher", engine)
    return len(opened)


@pytest.mark.usefixtures("saved")
def test_replicas_are_read_once_whatever_the_number_of_ranks(folder: Path) -> None:
    """Otherwise each rank would open each rank's file: 262,144 opens per learner at 512 ranks."""
    assert run_distributed(opened_to_resume, 3, folder, 0) == [2, 0, 0]
