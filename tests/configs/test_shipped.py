"""Every shipped YAML, and every YAML in the documentation, is what its schema says."""

import re
from pathlib import Path

import pytest

import configs
from benchmarks.study import StudyConfig
from cluster.config import ClusterConfig
from configs.devices import DeviceConfig
from data_pipeline import DataConfig
from model import EncoderConfig
from trainer.config import JobConfig

ROOT = Path(__file__).parents[2]
SCHEMAS = {
    "cluster": ClusterConfig,
    "data": DataConfig,
    "device": DeviceConfig,
    "job": JobConfig,
    "model": EncoderConfig,
    "study": StudyConfig,
}
FILES = sorted((ROOT / "configs").glob("*/*.yaml"))
EXAMPLES = [
    (page.name, text)
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for text in re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)
    if text.startswith("name:")
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_shipped_file_loads_by_its_name_and_survives_a_round_trip(path, tmp_path):
    kind = path.parent.name
    config = configs.load(path.stem, SCHEMAS[kind], kind)
    written = tmp_path / "written.yaml"
    written.write_text(configs.dump(config), encoding="utf-8")
    assert configs.load(str(written), SCHEMAS[kind], kind) == config


@pytest.mark.parametrize(("page", "text"), EXAMPLES)
def test_an_example_job_in_the_documentation_loads(page, text, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    assert configs.load(str(path), JobConfig, "job").students, page
