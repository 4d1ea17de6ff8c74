"""The main job on a GPU: NCCL, bf16 autocast, fused attention."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import TINY_JOB, tandem
from trainer import metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_follows_fp32(corpus, tmp_path, stage):
    """Every learner's first losses in bf16 are those in fp32, to bf16's precision."""
    curves = {}
    for precision in ("fp32", "bf16"):
        learners = ("teacher", "students.distilbert", "students.tinybert")
        overrides = [f"{one}.precision={precision}" for one in learners]
        overrides += [f"{one}.zero_stage={stage}" for one in learners]
        paths = [f"data.path={corpus}", f"runs={tmp_path}", f"name={precision}"]
        done = tandem("train", TINY_JOB, *paths, *overrides, "--nproc", 1, CUDA_VISIBLE_DEVICES="0")
        assert done.returncode == 0, done.stderr
        rows = metrics.read(tmp_path / precision / "metrics.jsonl")
        curves[precision] = metrics.series(rows, "students/tinybert/loss")[1]
    assert curves["bf16"] == pytest.approx(curves["fp32"], rel=0.02)
