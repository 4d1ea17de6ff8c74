"""A test that hangs fails, and affects no other test."""

from __future__ import annotations

import subprocess
import sys

import psutil

from tests.conftest import REPOSITORY

HANGING = """
import subprocess, time
import pytest
from pathlib import Path

@pytest.mark.timeout(2)
def test_that_waits_for_a_process(request):
    with subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE) as process:
        Path(request.path).with_name("pid").write_text(str(process.pid))
        process.stdout.read()

def test_that_passes():
    pass
"""


def test_a_hanging_test_fails_its_process_is_killed_and_the_next_one_runs(tmp_path):
    (tmp_path / "test_hanging.py").write_text(HANGING)
    command = [sys.executable, "-m", "pytest", "-p", "tests.timeouts", "-q", tmp_path]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert "Failed: Timeout (>2.0s)" in done.stdout
    assert "process.stdout.read()" in done.stdout, "where it was"
    assert "1 failed, 1 passed" in done.stdout
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
