"""The wheel in an environment of its own, in a folder with modules of the same names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.cluster.conftest import PROGRAMS, install
from tests.conftest import REPOSITORY, command_environment
from tests.test_entries import write_user_folder

pytestmark = pytest.mark.slow

TYPED = """
import tandem
job = tandem.load("demo")
reveal_type(tandem.load)
reveal_type(job.steps)
reveal_type(tandem.from_pretrained)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel, and this one's packages behind it."""
    folder = tmp_path_factory.mktemp("installed")
    source, environment = folder / "source", folder / "environment"
    left_out = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__", "tests")
    shutil.copytree(REPOSITORY, source, ignore=left_out)
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, source], check=True, timeout=600)
    return python


@pytest.fixture
def user_folder(tmp_path: Path) -> Path:
    return write_user_folder(tmp_path / "project")


def run(words: list[object], folder: Path, **environment: str) -> str:
    """The output of a command in `folder`, without this checkout on its path."""
    done = subprocess.run(
        list(map(str, words)),
        cwd=folder,
        env=command_environment(**{"PYTHONPATH": "", **environment}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("entry", ["tandem", "python -m tandem", "torchrun"])
def test_every_entry_imports_its_own_packages(python: Path, user_folder: Path, entry: str) -> None:
    launcher = [python, "-m", "torch.distributed.run", "--nproc-per-node=1", "-m", "tandem"]
    entries = {
        "tandem": [python.with_name("tandem")],
        "python -m tandem": [python, "-m", "tandem"],
        "torchrun": launcher,
    }
    shown = run([*entries[entry], "model", "bert_base", "--json"], user_folder)
    assert json.loads(shown)["parameters"] == 109_482_240
    assert "tinybert" in run([*entries[entry], "model", "configs/job/demo.yaml"], user_folder)


def test_the_code_that_slurm_starts_is_its_own(
    python: Path, user_folder: Path, corpus: Path, tmp_path: Path
) -> None:
    """What `submit` copies beside the batch script, and how that calls it."""
    install(tmp_path, **PROGRAMS)
    job = ["submit", "demo", f"data.path={corpus}", "--cluster", "cpu", "--no-check"]
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    run([python.with_name("tandem"), *job], user_folder, PATH=path)
    (submission,) = user_folder.glob("runs/demo/submissions/001")
    assert {path.name for path in (submission / "code").iterdir()} == {
        *("cluster", "commands", "configs", "data_pipeline", "model", "trainer"),
        *("tandem.py", "REVISION"),
    }
    script = (submission / "job.sbatch").read_text()
    assert f"train=({python} {submission}/code/tandem.py train {submission}/config.yaml)" in script
    entry = [python, submission / "code/tandem.py", "model", submission / "config.yaml"]
    assert "tinybert" in run(entry, user_folder, PYTHONPATH=str(submission / "code"))


def test_type_checkers_know_the_public_api(python: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TYPED)
    checker = [sys.executable, "-m", "mypy", "--cache-dir", tmp_path, "--follow-imports=silent"]
    told = run([*checker, "--python-executable", python, tmp_path / "mine.py"], tmp_path)
    assert "-> trainer.config.JobConfig" in told
    assert 'Revealed type is "int"' in told
    assert "-> model.protocol.Model" in told
