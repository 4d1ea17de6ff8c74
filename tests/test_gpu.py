"""The main job on a GPU: NCCL, 16-bit autocast, fused attention, offload.

What can also run on a CPU runs there too, so that a fault of the test itself is found without a
GPU.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch

from tests.configs.test_shipped_jobs import JOBS, LARGE, TEACHERS, arguments
from tests.conftest import TINY_JOB, tandem
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# What follows fp32, how it differs, and how closely.
WAYS = {
    "bf16": (["precision=bf16"], 0.02),
    "bf16_weights": (["precision=bf16_weights"], 0.02),
    "fp8": (["precision=fp8"], 0.04),
    "fp16": (["precision=fp16"], 0.02),
    "offload": (["offload=optimizer"], 1e-4),
}


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("kind", ["adamw", "lamb"])
@pytest.mark.parametrize(
    ("stage", "way"), [(n, way) for n in range(4) for way in WAYS if n or way != "offload"]
)
def test_other_ways_to_compute_follow_fp32(shared, corpus, tmp_path, stage, way, kind):
    """The losses of a student that trains from the first step on."""
    usual = shared(f"fp32-{stage}-{kind}", lambda folder: train(corpus, folder, stage, kind, []))
    settings, tolerance = WAYS[way]
    train(corpus, tmp_path, stage, kind, settings)
    found, plain = losses(tmp_path), losses(usual)
    assert found == pytest.approx(plain, rel=tolerance)
    assert way == "offload" or found != plain, f"{way} was not used"


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("name", [job for job in JOBS if job not in LARGE])
def test_a_shipped_job_trains(name, corpus, tmp_path):
    """At tiny widths, in the job's own precision, with layers compiled by default."""
    for job in [*({Path(TEACHERS[name]).parts[0]} if name in TEACHERS else []), name]:
        done = tandem(*arguments(job, corpus, tmp_path), CUDA_VISIBLE_DEVICES="0")
        assert done.returncode == 0, done.stderr
    rows = metrics.read(tmp_path / name / "metrics.jsonl")
    found = [row[key] for row in rows for key in row if key.endswith("/loss")]
    assert found
    assert all(map(math.isfinite, found))


def train(corpus, folder, stage, kind, settings):
    """The tiny job, whose layers are not compiled, since that takes longer than all else."""
    settings = [*settings, f"zero_stage={stage}", f"optimizer.kind={kind}", "compile=false"]
    learners = ("teacher", "students.distilbert", "students.tinybert")
    overrides = [f"{one}.{setting}" for one in learners for setting in settings]
    paths = [f"data.path={corpus}", f"output_dir={folder}", "--nproc", 1]
    done = tandem("train", TINY_JOB, *paths, *overrides, CUDA_VISIBLE_DEVICES="0")
    assert done.returncode == 0, done.stderr


def losses(folder):
    rows = metrics.read(folder / "tiny/metrics.jsonl")
    return metrics.series(rows, "students/tinybert/loss")[1]


@pytest.mark.parametrize(
    ("stage", "device"),
    [
        (1, "cpu"),
        *(pytest.param(n, "gpu", marks=[pytest.mark.gpu, NEEDS_GPU]) for n in (0, 1, 3)),
    ],
)
def test_what_is_saved_beside_the_next_step_is_what_there_was_before_it(
    corpus, tmp_path, stage, device
):
    """A run resumed from an intermediate checkpoint repeats its losses, to the last bit."""
    stages = [f"{one}.zero_stage={stage}" for one in ("teacher", "students.tinybert")]
    paths = [f"data.path={corpus}", f"output_dir={tmp_path}", "checkpoint.keep=4", "--nproc", 1]
    stages.append("deterministic=true")
    folder = RunFolder(tmp_path / "tiny")

    def trained(resumes: str = "") -> list[float]:
        visible = "0" if device == "gpu" else ""
        done = tandem("train", TINY_JOB, *paths, *stages, CUDA_VISIBLE_DEVICES=visible)
        assert done.returncode == 0, done.stderr
        assert resumes in done.stdout + done.stderr, "otherwise it began anew"
        return metrics.series(metrics.read(folder.metrics), "teacher/loss")[1]

    once = trained()
    assert "deterministic kernels: True" in folder.rank_log(0).read_text()
    for later in ("step-000000006", "step-000000008"):
        shutil.rmtree(folder.checkpoints / later)
    folder.evaluation.unlink()
    assert trained(resumes="resuming from step 4") == once
