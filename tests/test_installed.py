"""The installed package, away from its checkout."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY, command_environment
from tests.test_entries import write_user_folder


@pytest.mark.slow
def test_an_installed_tandem_finds_its_configs(tmp_path):
    """`pip install .` (its dependencies aside), in a folder with modules of the same names."""
    source, installed = tmp_path / "source", tmp_path / "installed"
    left_out = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(REPOSITORY, source, ignore=left_out)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", installed]
    subprocess.run([*pip, source], check=True, timeout=600)
    user_folder = write_user_folder(tmp_path / "project")
    environment = command_environment(PYTHONPATH=str(installed))
    command = [sys.executable, "-m", "tandem", "model", "bert_base", "--json"]
    done = subprocess.run(
        command,
        cwd=user_folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert json.loads(done.stdout)["parameters"] == 109_482_240
    job = [sys.executable, "-m", "tandem", "model", "configs/job/demo.yaml"]
    done = subprocess.run(
        job, cwd=user_folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert "tinybert" in done.stdout, done.stderr
