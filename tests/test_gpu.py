"""The main job on a GPU: NCCL, 16-bit autocast, fused attention, offload."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import TINY_JOB, tandem
from trainer import metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


# What follows fp32, how it differs, and how closely.
WAYS = {
    "bf16": (["precision=bf16"], 0.02),
    "fp16": (["precision=fp16"], 0.02),
    "offload": (["offload=optimizer"], 1e-4),
}


@pytest.mark.parametrize("kind", ["adamw", "lamb"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_other_ways_to_compute_follow_fp32(corpus, tmp_path, stage, kind):
    """The losses of a student that takes part from the first step on."""
    plain = losses(corpus, tmp_path, "fp32", stage, kind, [])
    for way, (settings, tolerance) in WAYS.items():
        if stage or way != "offload":
            found = losses(corpus, tmp_path, way, stage, kind, settings)
            assert found == pytest.approx(plain, rel=tolerance), way


def losses(corpus, runs, name, stage, kind, settings):
    settings = [*settings, f"zero_stage={stage}", f"optimizer.kind={kind}"]
    learners = ("teacher", "students.distilbert", "students.tinybert")
    overrides = [f"{one}.{setting}" for one in learners for setting in settings]
    paths = [f"data.path={corpus}", f"runs={runs}", f"name={name}"]
    done = tandem("train", TINY_JOB, *paths, *overrides, "--nproc", 1, CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 0, done.stderr
    rows = metrics.read(runs / name / "metrics.jsonl")
    return metrics.series(rows, "students/tinybert/loss")[1]
