import pytest

from configs import loading
from tests.configs import example_job


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A folder of shipped configs, and another folder as working directory."""
    folder = tmp_path / "shipped"
    example_job.ship(folder)
    monkeypatch.setattr(loading, "SHIPPED", folder)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return folder
