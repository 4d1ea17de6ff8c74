"""Every shipped study runs through its runner; its table is what the runs' scores say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import configs
from benchmarks import study
from configs.studies import ArmConfig, StudyConfig
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


def jobs(name: str, folder: Path) -> list[Path]:
    return list(study.job_files(study.load(name), folder, [1]))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_job_of_a_shipped_study_is_one_that_can_run(name, tmp_path):
    """The strict loader takes it, and a job before it leaves what it begins with."""
    before: list[str] = []
    for job in jobs(name, tmp_path):
        config = configs.load(str(job), JobConfig, "job")
        start = config.teacher.init.pretrained
        assert start is None or start in [f"{tmp_path}/{one}/exports/teacher" for one in before]
        before.append(config.name)


# One whose second job begins with what the first left runs always, the others where time allows.
@pytest.mark.parametrize(
    "name", [name if name == "mapping" else pytest.param(name, marks=pytest.mark.slow)
             for name in SHIPPED]
)  # fmt: skip
def test_a_shipped_study_runs_and_has_its_rows(name, corpus, tmp_path, monkeypatch, capsys):
    """The runner's own train would start a process for every job; here one runs them all."""
    told = {
        job.stem: ["train", str(job), f"data.path={corpus}", *TINY, *at_once(job)]
        for job in jobs(name, tmp_path / name)
    }
    for job, (code, output) in run_jobs(told, tmp_path).items():
        assert code == 0, (job, output)
    asked: list[str] = []
    monkeypatch.setattr(study, "train", lambda job, overrides: asked.append(job.stem))
    study.main([name, "--runs", str(tmp_path), "--seed", "1"], standalone_mode=False)
    assert asked == list(told)
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines()[4:]]
    assert len(rows) == sum(len(arm.learners) for arm in study.load(name).arms.values())
    assert all(row[2] == "1" for row in rows), rows


def test_it_names_the_studies(capsys):
    study.main([], standalone_mode=False)
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == SHIPPED


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch"], "nosuch: no such study config"),
        (["online", "--arm", "nosuch"], "online has no arm 'nosuch'; there are: alone, online"),
    ],
)
def test_names_that_there_are_not(arguments, said):
    result = CliRunner().invoke(study.main, arguments)
    assert (result.exit_code > 0, said in result.output) == (True, True), result.output


def write_scores(folder: Path, run: str, **accuracies: float) -> None:
    learners = {
        name.replace("_", "/"): {"accuracy": one, "loss": 6.0} for name, one in accuracies.items()
    }
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


def test_without_results_of_the_first_row_there_is_no_difference(tmp_path, monkeypatch, capsys):
    """And `--table` runs nothing, and counts seeds that the study does not name."""
    monkeypatch.setattr(study, "train", lambda job, overrides: pytest.fail("it ran a job"))
    write_scores(tmp_path / "masking", "dynamic-4", teacher=0.1)
    study.main(["masking", "--runs", str(tmp_path), "--table"], standalone_mode=False)
    assert capsys.readouterr().out.splitlines()[4:] == [
        "| static | teacher | 0 |  |  |  |",
        "| dynamic | teacher | 1 | 0.1000 | 6.0000 |  |",
    ]


def test_a_job_begins_with_what_an_earlier_arm_left(tmp_path):
    arms = {"first": ArmConfig(), "second": ArmConfig({"teacher": {"init": "$runs/first-$seed"}})}
    config = StudyConfig("Why?", {"steps": 1}, arms, seeds=[1, 2])
    jobs = list(study.job_files(config, tmp_path, [2], ["second"]))
    assert [job.name for job in jobs] == ["second-2.yaml"]
    assert f"init: {tmp_path}/first-2\n" in jobs[0].read_text()
