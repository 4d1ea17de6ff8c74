"""A fresh real SLURM cluster per test, and a stand-in for the code that is submitted to it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.slurm import SOURCE
from tests.slurm.real_slurm import RealSlurm, why_not


@pytest.fixture
def slurm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealSlurm]:
    """Three nodes; SLURM's commands in this process speak to them. Skips where it cannot run."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with RealSlurm(**getattr(request, "param", {"nodes": 3})) as running:
        monkeypatch.setenv("SLURM_CONF", str(running.layout.conf))
        monkeypatch.chdir(running.root)
        yield running


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a submission copies: this package, and the stand-in for the command line."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("cluster", "configs"):
        shutil.copytree(SOURCE / name, folder / name)
    shutil.copy(Path(__file__).parent / "standin/tandem.py", folder / "tandem.py")
    return folder
