"""Every kind of DeepSpeed engine is saved and restored to the last bit, in one save."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_distributed
from tests.trainer.checkpoint.learners import Kind, digest, start, train
from tests.trainer.checkpoint.saving import plain_engine
from trainer.checkpoint.folder import Retention
from trainer.checkpoint.layout import full_state_dict
from trainer.checkpoint.manifest import read_manifest
from trainer.checkpoint.reader import Checkpoint
from trainer.checkpoint.snapshot import prepare_snapshot
from trainer.checkpoint.writer import CheckpointWriter
from trainer.errors import CheckpointError

KINDS = {
    # Stage 3 first: its first engine replaces torch's linear in the whole process.
    "stage-3": Kind(3),
    "stage-3-bf16": Kind(3, "bf16"),
    "stage-3-autocast": Kind(3, "autocast"),
    "stage-3-offload": Kind(3, offload=True),
    "stage-3-frozen": Kind(3, trained=False),
    "stage-3-nadam": Kind(3, optimizer="NAdam"),
    "stage-2-sgd": Kind(2, optimizer="SGD"),
    "stage-2-bf16": Kind(2, "bf16"),
    "stage-2-offload": Kind(2, offload=True),
    "stage-2-round-robin": Kind(2, round_robin=True),
    "stage-1-bf16": Kind(1, "bf16"),
    "stage-1-autocast": Kind(1, "autocast"),
    "stage-0-autocast": Kind(0, "autocast"),
    "stage-0-frozen": Kind(0, trained=False),
}
WRAPPERS = {
    "stage-3-frozen": "DeepSpeedZeRoOffload",
    "stage-2-bf16": "DeepSpeedZeroOptimizer",
    "stage-0-autocast": "AdamW",
    "stage-0-frozen": "NoneType",
}
OTHER = {  # resumed as another kind: the masters arrive exactly
    "stage-3-bf16": Kind(0),
    "stage-2-offload": Kind(3, "bf16"),
    "stage-1-bf16": Kind(3, offload=True),
    "stage-2-round-robin": Kind(1, "bf16"),
    "stage-2-sgd": Kind(1, optimizer="SGD"),
    "stage-0-autocast": Kind(2, "bf16"),
    "stage-1-autocast": Kind(3, trained=False),
}


def round_trip(folder: Path) -> dict[str, Any]:
    engines = {name: start(kind) for name, kind in KINDS.items()}
    trained = {name: engine for name, engine in engines.items() if KINDS[name].trained}
    for engine in trained.values():
        train(engine, 0, 2)
    engines["stage-1-bf16"].optimizer.loss_scaler = loss_scaler(cur_scale=512.0, cur_iter=7)
    weights = {name: full_state_dict(engine) for name, engine in engines.items()}
    writer = CheckpointWriter(folder, Retention())
    writer.save(2, engines, {})
    expected = {name: train(engine, 2, 4) for name, engine in trained.items()}
    assert writer.wait()

    checkpoint = Checkpoint(folder, 2)
    fresh = {name: start(kind, seed=1) for name, kind in KINDS.items()}
    fresh["stage-1-bf16"].optimizer.loss_scaler = loss_scaler(cur_scale=1.0, cur_iter=0)
    for name, engine in fresh.items():
        checkpoint.load(name, engine)
    scaler = dict(vars(fresh["stage-1-bf16"].optimizer.loss_scaler))
    loaded = {name: digest(full_state_dict(engine)) for name, engine in fresh.items()}
    resumed = {name: train(fresh[name], 2, 4) for name in trained}
    return {
        "weights": {name: digest(state) for name, state in weights.items()},
        "squares": {name: squares(state) for name, state in weights.items()},
        "health": read_manifest(checkpoint.path).health,
        "loaded": loaded,
        "expected": expected,
        "resumed": resumed,
        "wrappers": {name: type(engine.optimizer).__name__ for name, engine in engines.items()},
        "dtypes": {str(t.dtype) for state in weights.values() for t in state.values()},
        "scaler": {key: scaler[key] for key in ("cur_scale", "cur_iter", "min_scale")},
        "parameters": live_parameters_follow(fresh["stage-3-bf16"], fresh["stage-1-bf16"]),
        **resume_as_others(checkpoint),
    }


def squares(state: dict[str, torch.Tensor]) -> float:
    return sum(float((t.double() ** 2).sum()) for t in state.values() if t.is_floating_point())


def loss_scaler(**numbers: float) -> Any:
    """The scaler of an fp16 engine, which does not run on a CPU."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(1.0, 100, 0.25, 2, False)
    vars(scaler).update(numbers)
    return scaler


def live_parameters_follow(*engines: Any) -> bool:
    """Whether the forward pass's bf16 parameters equal the rounded masters."""
    import deepspeed

    for engine in engines:
        masters = full_state_dict(engine)
        for name, parameter in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter]):
                if not torch.equal(parameter, masters[name].to(torch.bfloat16)):
                    return False
    return True


def resume_as_others(checkpoint: Checkpoint) -> dict[str, Any]:
    exact, finite = {}, {}
    for name, kind in OTHER.items():
        engine = start(kind, seed=1)
        checkpoint.load(name, engine)
        exact[name] = same_masters(full_state_dict(engine), checkpoint.master_weights(name), kind)
        finite[name] = not kind.trained or all(loss < 10 for loss in train(engine, 2, 4))
    return {"exact": exact, "finite": finite}


def same_masters(
    here: dict[str, torch.Tensor], stored: dict[str, torch.Tensor], kind: Kind
) -> bool:
    """Equal to the bit. A frozen parameter has no master: in a bf16 engine it is bf16."""
    expected = dict(stored)
    if kind.precision == "bf16":
        expected["scale"] = stored["scale"].bfloat16().float()
    return digest(here) == digest(expected)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_distributed(round_trip, 2, tmp_path_factory.mktemp("kinds"))[0]


def test_each_kind_of_optimizer_has_its_own_wrapper(result: dict[str, Any]) -> None:
    assert {name: result["wrappers"][name] for name in WRAPPERS} == WRAPPERS


def test_weights_come_back_exactly(result: dict[str, Any]) -> None:
    assert result["loaded"] == result["weights"]
    assert result["dtypes"] == {"torch.float32", "torch.int64"}
    assert result["parameters"]


def test_the_norm_of_the_weights_is_that_over_all_ranks(result: dict[str, Any]) -> None:
    for name, squares in result["squares"].items():
        health = result["health"][name]
        assert health.finite
        assert health.norm == pytest.approx(math.sqrt(squares), rel=1e-6), name


def test_training_continues_bit_for_bit(result: dict[str, Any]) -> None:
    assert result["resumed"] == result["expected"]


def test_the_loss_scale_comes_back_and_its_settings_stay(result: dict[str, Any]) -> None:
    assert result["scaler"] == {"cur_scale": 512.0, "cur_iter": 7, "min_scale": 0.25}


def test_a_state_that_is_not_elementwise_is_refused() -> None:
    engine = plain_engine(1.0)
    engine.optimizer = torch.optim.Adafactor(engine.module.parameters())
    engine.module(torch.ones(5)).sum().backward()
    engine.optimizer.step()
    with pytest.raises(CheckpointError, match="weight: the optimizer's state 'row_var'"):
        prepare_snapshot(engine, rank=0, world_size=1)


def test_another_kind_gets_the_same_masters(result: dict[str, Any]) -> None:
    assert all(result["exact"].values()), result["exact"]
    assert all(result["finite"].values()), result["finite"]
