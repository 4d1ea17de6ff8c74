"""Shipped jobs run on CUDA, eager and compiled: on fake tensors."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY, command_environment


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("job", ["everything", "deberta_v3_base"])
def test_a_job_has_no_fault_on_cuda(job):
    done = subprocess.run(
        [sys.executable, "benchmarks/roofline.py", job],
        cwd=REPOSITORY,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "joint step" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_every_shipped_job_is_loaded():
    code = "from benchmarks import roofline as r; print(*(r.load(n).name for n in r.SHIPPED_JOBS))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=command_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "modernbert_large" in done.stdout
