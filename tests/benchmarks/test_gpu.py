"""The GPU benchmark also runs without a GPU, and the pages say what has been run on one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import configs
from benchmarks import gpu_facts, gpu_wheels
from benchmarks.gpu import MEASURES, RUNS, SECTIONS
from benchmarks.gpu_runs import BEGINS, LARGE
from tests.conftest import REPOSITORY, command_environment
from trainer.config import JobConfig


@pytest.mark.slow
def test_every_section_runs_without_a_gpu(tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", "--out", tmp_path, "--only", *SECTIONS, "job"]
    environment = command_environment()
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=590
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "gpu_facts.json").read_text())
    found = facts["sections"]
    assert (facts["device"], found.keys()) == (None, {*SECTIONS, "job"})
    assert "figures of a GPU are missing" in done.stdout
    assert [what for what, _ in found["speed"]] == [
        f"toy, 4 x 32, {arm}" for arm in ("Tandem, bf16", "Tandem, bf16_weights", "transformers")
    ]  # fmt: skip
    assert [figures for _, figures in found["syncs"]] == ["- (needs a GPU)"] * 4
    assert [figures for _, figures in found["resumed"]] == ["the same bits"] * 4
    assert [what for what, _ in found["job"]][-1].startswith("the job's students/tinybert/loss")
    assert {one.name for one in tmp_path.iterdir()} == {
        "gpu_facts.json", "gpu.md", "job.log", "metrics.jsonl", "report.html",
    }  # fmt: skip


def test_the_pages_say_what_the_facts_say():
    parts = gpu_facts.parts_of(json.loads(gpu_facts.FACTS.read_text(encoding="utf-8")))
    for page in gpu_facts.PAGES:
        text = page.read_text(encoding="utf-8")
        assert gpu_facts.MARKED.search(text), page
        assert text == gpu_facts.renewed(text, parts), "run python benchmarks/gpu_facts.py"


def test_facts_become_rows_and_what_is_not_run_is_said():
    facts = {"device": "NVIDIA H100", "date": "2026-01-02", "sections": {"speed": [["a", "1"]]}}
    table = gpu_facts.table(facts, {"speed": "Speed", "zero": "A step"})
    assert table.splitlines()[2:] == [
        "| `speed` | a | 1 |", f"| `zero` | A step | {gpu_facts.NOT_RUN} |",
    ]  # fmt: skip
    sentence = gpu_facts.sentence(facts, {"speed": "Speed", "zero": "A step"})
    assert sentence == "Run on an NVIDIA H100 (2026-01-02): `speed`; not run: `zero`."
    assert MEASURES.keys() == SECTIONS.keys() | RUNS.keys()
    # Figures of a machine without a GPU are none.
    assert gpu_facts.NOT_RUN in gpu_facts.table({**facts, "device": None}, {"speed": "Speed"})


def test_what_is_carried_is_what_the_project_requires_and_pytorch_does_not():
    names = gpu_wheels.missing("3.12").keys()
    assert {"deepspeed", "omegaconf", "webdataset", "pydantic", "pytest"} <= names
    assert not names & {"torch", "transformers", "numpy", "tokenizers", "tandem-distill"}


def test_the_job_on_a_gpu_is_a_job():
    job = configs.load("demo", JobConfig, "job", [*LARGE, BEGINS])
    assert [learner.precision for learner in job.learners.values()] == [
        "bf16_weights", "bf16_weights", "bf16",
    ]  # fmt: skip
    assert job.learners["students/distilbert"].model.layers == 6
