"""The GPU benchmark also runs without a GPU, and says that its figures are missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY, command_environment


@pytest.mark.slow
def test_every_section_runs_without_a_gpu():
    command = [sys.executable, "benchmarks/gpu.py"]
    environment = command_environment()
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stderr
    table = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    assert "figures of a GPU are missing" in done.stdout
    assert [what for what, _ in table[:2]] == ["toy, 4 x 32, Tandem", "toy, 4 x 32, transformers"]
    assert sum(figures == "- (needs a GPU)" for _, figures in table) == 4
    assert [figures for _, figures in table[-4:]] == ["the same bits"] * 4
