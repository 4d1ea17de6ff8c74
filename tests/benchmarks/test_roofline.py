"""Shipped jobs run on CUDA, eager and compiled: on fake tensors."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY, command_environment


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_a_job_has_no_fault_on_cuda():
    done = subprocess.run(
        [sys.executable, "benchmarks/roofline.py", "everything"],
        cwd=REPOSITORY,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "joint step" in done.stdout
