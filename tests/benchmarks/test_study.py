"""Every shipped study runs through its runner; its table is what the runs' scores say."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Sequence
from pathlib import Path

import pytest

import configs
from benchmarks import study
from benchmarks.study import ArmConfig, StudyConfig
from tests.distributed import free_port, set_rank_environment

SHIPPED = sorted(path.stem for path in Path(configs.__file__).parent.glob("study/*.yaml"))
TINY = [
    "steps=2", "batch.size=2", "batch.micro_batch=2", "data.sequence_length=32",
    "evaluation.sequences=4", "log.every=1",
]  # fmt: skip


def run_command_line(job: Path, overrides: Sequence[str]) -> None:
    """What `tandem train` does, as the only rank, without measuring speeds for seconds."""
    set_rank_environment(0, 1, free_port())
    import tandem
    from trainer import evaluation

    evaluation.SPEED_SECONDS = 0.0
    tandem.main(["train", str(job), *overrides])


@pytest.fixture
def cheap_processes(monkeypatch):
    """Jobs run in forks of a process that has imported everything: a second each, not six."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["deepspeed", "trainer.run", "transformers"])

    def train(job: Path, overrides: Sequence[str]) -> None:
        process = server.Process(target=run_command_line, args=(job, overrides))
        process.start()
        process.join(120)
        assert process.exitcode == 0, job

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(study, "train", train)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_arm_of_a_shipped_study_runs(name, cheap_processes, corpus, tmp_path, capsys):
    options = ["--corpus", str(corpus), "--runs", str(tmp_path), "--seed", "1"]
    study.main([name, *options, *TINY], standalone_mode=False)
    config = configs.load(name, StudyConfig, "study")
    for arm in config.arms:
        assert (tmp_path / name / f"{arm}-1" / "evaluation.json").is_file()
    rows = capsys.readouterr().out.splitlines()[4:]
    assert len(rows) == sum(len(arm.learners) for arm in config.arms.values())


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
