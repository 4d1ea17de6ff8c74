"""Every shipped study runs through its runner; its table is what the runs' scores say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import configs
from benchmarks import study
from benchmarks.study import ArmConfig, StudyConfig
from tests.configs.run_jobs import run_jobs
from trainer.config import JobConfig

SHIPPED = sorted(path.stem for path in Path(configs.__file__).parent.glob("study/*.yaml"))
TINY = [
    "steps=2", "batch.size=2", "batch.micro_batch=2", "data.sequence_length=32",
    "evaluation.sequences=4", "log.every=1",
]  # fmt: skip


def at_once(job: Path) -> list[str]:
    """Overrides by which every student of the job joins before the first step."""
    students = configs.load(str(job), JobConfig, "job").students
    return [f"students.{name}.start.step=0" for name in students]


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """The folder of all studies' runs with one seed, each of two steps."""
    folder = tmp_path_factory.mktemp("studies")
    told = {
        f"{name}/{job.stem}": ["train", str(job), f"data.path={corpus}", *TINY, *at_once(job)]
        for name in SHIPPED
        for job in study.job_files(configs.load(name, StudyConfig, "study"), folder / name, [1])
    }
    for name, (code, output) in run_jobs(told, folder).items():
        assert code == 0, (name, output)
    return folder


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_study_runs_and_has_its_rows(name, runs, monkeypatch, capsys):
    """The runner's own train would find every run finished, and only start processes to say so."""
    asked: list[str] = []
    monkeypatch.setattr(study, "train", lambda job, overrides: asked.append(job.stem))
    study.main([name, "--runs", str(runs), "--seed", "1"], standalone_mode=False)
    config = configs.load(name, StudyConfig, "study")
    assert asked == [f"{arm}-1" for arm in config.arms]
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines()[4:]]
    assert len(rows) == sum(len(arm.learners) for arm in config.arms.values())
    assert all(row[2] == "1" for row in rows), rows


def test_it_names_the_studies(capsys):
    study.main([], standalone_mode=False)
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == SHIPPED


def write_scores(folder: Path, run: str, **accuracies: float) -> None:
    learners = {name.replace("_", "/"): {"accuracy": one} for name, one in accuracies.items()}
    path = folder / run / "evaluation.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"learners": learners}), encoding="utf-8")


def test_the_table_gives_mean_spread_and_paired_difference(tmp_path):
    """Paired: seeds that differ by 0.1 do not blur a difference of 0.02 that each of them has."""
    arms = {"alone": ArmConfig(), "taught": ArmConfig(learners=["pupil", "late"])}
    config = StudyConfig("Why?", {}, arms, seeds=[1, 2, 3], scores=["accuracy"])
    write_scores(tmp_path, "alone-1", teacher=0.1)
    write_scores(tmp_path, "alone-2", teacher=0.2)
    write_scores(tmp_path, "taught-1", students_pupil=0.12)
    write_scores(tmp_path, "taught-2", students_pupil=0.22)
    assert study.table(config, tmp_path).splitlines() == [
        "| arm | learner | seeds | accuracy | difference |",
        "|---|---|---|---|---|",
        "| alone | teacher | 2 | 0.1500 ± 0.0707 | 0.0000 ± 0.0000 |",
        "| taught | pupil | 2 | 0.1700 ± 0.0707 | 0.0200 ± 0.0000 |",
        "| taught | late | 0 |  |  |",
    ]


def test_a_job_begins_with_what_an_earlier_arm_left(tmp_path):
    arms = {"first": ArmConfig(), "second": ArmConfig({"teacher": {"init": "$runs/first-$seed"}})}
    config = StudyConfig("Why?", {"steps": 1}, arms, seeds=[1, 2])
    jobs = list(study.job_files(config, tmp_path, [2], ["second"]))
    assert [job.name for job in jobs] == ["second-2.yaml"]
    assert f"init: {tmp_path}/first-2\n" in jobs[0].read_text()
