"""One real SLURM cluster for all tests, and a stand-in for the submitted code."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.slurm import SOURCE
from tests.slurm.real_slurm import RealSlurm, why_not


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[RealSlurm]:
    """Three nodes with two simulated GPUs each. Skips where it cannot run."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with RealSlurm(nodes=3, gpus=2) as running:
        yield running


@pytest.fixture
def slurm(
    shared_cluster: RealSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RealSlurm]:
    """The cluster, idle and intact, which SLURM's commands in this process address.

    A test works in its own folder, `root`, and may break anything.
    """
    shared_cluster.root = tmp_path
    monkeypatch.setenv("SLURM_CONF", str(shared_cluster.layout.conf))
    monkeypatch.chdir(tmp_path)
    yield shared_cluster
    shared_cluster.mend()


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a submission copies: this package, and the stand-in for the command line."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("cluster", "configs"):
        shutil.copytree(SOURCE / name, folder / name)
    shutil.copy(Path(__file__).parent / "standin/tandem.py", folder / "tandem.py")
    return folder
