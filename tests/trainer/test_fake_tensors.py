"""Fake tensors of plans, against torch's own (`torch._subclasses.FakeTensorMode`)."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from model import EncoderConfig, module_of
from model.encoder import Encoder
from tests.trainer.test_footprint import job
from trainer.config import JobConfig
from trainer.footprint import fake_tensors, footprint
from trainer.footprint.demands import demands, demands_apart
from trainer.footprint.fake_tensors import FakeMode, FakeTensor, rule_of
from trainer.footprint.footprint import footprints_and_passes
from trainer.footprint.work import Work

SIZES = {"vocab_size": 50, "hidden_size": 32, "layers": 4, "heads": 2, "ffn_size": 64}
MODELS = {
    "post norm": EncoderConfig(**SIZES, max_positions=64),
    "local layers": EncoderConfig(
        **SIZES,
        max_positions=64,
        norm_placement="pre",
        positions="rotary",
        feed_forward="glu",
        local_window=8,
        global_every=3,
    ),
}


def counted(mode, to_fake, config, autocast: bool) -> tuple[Work, list[tuple]]:
    """A model's forward and backward in a mode, and the layouts of the gradients."""
    with mode:
        model = module_of(config)(config)
        ids = to_fake(torch.zeros(4, 32, dtype=torch.long))
        with Work() as work, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model.encode(ids).last_hidden_state.square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        return work, [(g.shape, g.stride(), g.dtype) for g in gradients if g is not None]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_operations_and_bytes_as_of_torchs_fake_tensors(name, autocast) -> None:
    theirs = FakeTensorMode()
    expected, layouts = counted(theirs, theirs.from_tensor, MODELS[name], autocast)
    work, ours = counted(FakeMode(), FakeTensor, MODELS[name], autocast)
    assert ours == layouts
    assert (work.flops, work.kernels) == (expected.flops, expected.kernels)
    assert (work.now, work.peak) == pytest.approx((expected.now, expected.peak), rel=1e-3)


def test_views_share_their_base_and_operations_in_place_return_it() -> None:
    with FakeMode():
        base = FakeTensor(torch.zeros(4, 6))
        parts = [base.t(), base[1:], *base.unbind()]
        assert base.add_(1) is base
        assert base[0, 0].item() == 0.0
        assert not (base == 1).any()
        assert base.add(1).untyped_storage()._cdata != base.untyped_storage()._cdata
    assert {part.untyped_storage()._cdata for part in parts} == {base.untyped_storage()._cdata}
    assert base.untyped_storage().nbytes() == 4 * 4 * 6
    with pytest.raises(AssertionError, match="outside of FakeMode"):
        base + 1


X = torch.empty(4, 6, 8, device="meta")
ROW, COLUMN = X[0, 0], X[..., :1]
HALF, FLAGS = X.bfloat16().transpose(0, 2), X > 0
ATEN = torch.ops.aten
OPERATIONS = [
    (ATEN.mul.Tensor, X, ROW),
    (ATEN.mul.Tensor, X.bfloat16(), 2.0),
    (ATEN.add.Tensor, HALF, HALF),
    (ATEN.add.Tensor, HALF, X[0, 0, 0]),
    (ATEN.div.Tensor, X.long(), 2),
    (ATEN.ge.Scalar, COLUMN.expand(4, 6, 8), 0),
    (ATEN.where.self, FLAGS, HALF.transpose(0, 2), X),
    (ATEN.gelu_backward.default, X.transpose(0, 1), X.transpose(0, 1)),
    (ATEN.exp_.default, HALF),
    (ATEN.normal_.default, X),
    (ATEN.cat.default, [X, COLUMN], -1),
    (ATEN.stack.default, [HALF, HALF], -2),
    (ATEN.arange.default, 7),
    (ATEN.arange.start_step, 0, 7, 2),
    (ATEN.native_layer_norm.default, X.transpose(0, 1), [8], ROW, None, 1e-5),
    (ATEN.native_layer_norm.default, X.bfloat16(), [6, 8], None, None, 1e-5),
    (
        *(ATEN.native_layer_norm_backward.default, X, X.transpose(0, 1).reshape(4, 6, 8), [8]),
        *(COLUMN, COLUMN, ROW, None, [True, True, False]),
    ),
]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: str(operation[0]))
def test_rules_give_what_torchs_meta_kernels_give(operation) -> None:
    function, *arguments = operation
    keywords = {"device": "meta"} if function.overloadpacket is ATEN.arange else {}
    rule = rule_of(function, keywords)
    assert rule is not function
    ours, theirs = (tree_leaves(run(*arguments, **keywords)) for run in (rule, function))
    layouts = (
        [one if one is None else (one.shape, one.stride(), one.dtype) for one in results]
        for results in (ours, theirs)
    )
    assert next(layouts) == next(layouts)


@pytest.mark.slow
def test_a_plan_does_not_load_torchs_compiler() -> None:
    code = (
        "import sys; from commands.models import plan_job\n"
        "plan_job(['ettin_family', '--nodes', '64'], standalone_mode=False)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def of_depth(layers: int, precision: str) -> JobConfig:
    config = job(precision=precision)
    config.teacher.model = dataclasses.replace(MODELS["local layers"], layers=layers)
    config.students["half"].model = dataclasses.replace(MODELS["post norm"], layers=layers)
    del config.students["narrow"]
    return config


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_that_do_not_run_count_as_if_they_did(precision) -> None:
    config = of_depth(7, precision)
    repeated = footprints_and_passes(config, "gpu", 64)[0]
    with mock.patch.object(Encoder, "run_layers_by"):
        run = footprints_and_passes(config, "gpu", 64)[0]
    for name, expected in run.items():
        for key, value in dataclasses.asdict(expected).items():
            close = 0.01 if key == "activations" else 1e-12
            assert getattr(repeated[name], key) == pytest.approx(value, rel=close), (name, key)


def test_a_plan_of_deeper_models_runs_no_more_operations() -> None:
    def operations(layers: int) -> tuple[int, int]:
        """Of all learners, and those of them that are no look-ups."""
        config = of_depth(layers, "bf16")
        dispatch, run = Work.__torch_dispatch__, fake_tensors._run
        counted = mock.patch.object(Work, "__torch_dispatch__", autospec=True, side_effect=dispatch)
        fresh = mock.patch.object(footprint, "MODE", FakeMode())
        looked_up = mock.patch.object(fake_tensors, "_run", side_effect=run)
        with fresh, counted as every, looked_up as first:
            demands_apart(config, demands(config).learners)
        return every.call_count, first.call_count

    every, first = operations(12)
    assert (every, first) == operations(6)
    assert every < 3700
    assert first < 1300
