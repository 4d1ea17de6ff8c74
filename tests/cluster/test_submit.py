"""`tandem submit` short of SLURM: dry runs, refusals, and what a submission's folder holds."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

import tandem
from cluster import LaunchError, commands


@pytest.fixture(autouse=True)
def _sbatch(tmp_path, monkeypatch):
    """An sbatch that takes every job, and a queue with nothing in it."""
    for name, text in {"sbatch": 'echo "$*" >>"$0.calls"; echo 41', "squeue": ":"}.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)


def test_dry_run_touches_nothing(tmp_path, capsys):
    options = ["--nodes", "4", "--gpus-per-node", "8", "--partition", "p q"]
    commands.submit("demo", Path("runs/demo"), "a: 1\n", "gpu", options, dry_run=True)
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/bash\n")
    for line in ("nodes=4", "ntasks-per-node=8", "gpus-per-node=8", "partition='p q'"):
        assert f"#SBATCH --{line}\n" in text
    assert not (tmp_path / "runs").exists()


def test_submission_folder(tmp_path, capsys):
    commands.submit("demo", Path("runs/demo"), "steps: 3\n")
    folder = tmp_path / "runs/demo/submissions/001"
    assert (folder / "config.yaml").read_text() == "steps: 3\n"
    assert (folder / "jobs").read_text() == "41\n"
    assert (folder / "code/cluster/ranks.py").is_file()
    assert (folder / "code/configs/cluster/gpu.yaml").is_file()
    assert not list(folder.rglob("__pycache__"))
    assert "job 41" in capsys.readouterr().out
    commands.submit("demo", Path("runs/demo"), "steps: 4\n")
    assert (folder / "config.yaml").read_text() == "steps: 3\n"
    assert (folder.with_name("002") / "config.yaml").read_text() == "steps: 4\n"


def test_seeds(tmp_path, capsys):
    commands.submit("demo", Path("runs/demo"), "", seeds=[3, 4])
    assert (tmp_path / "runs/demo/submissions/001/seeds").read_text() == "3\n4\n"
    assert "demo-seedN/logs" in capsys.readouterr().out


def test_words_of_the_job_and_words_of_sbatch(capsys):
    """In any order; what is neither is refused by the nearest key."""
    words = ["demo", "steps=7", "--export", "A=1", "--exclusive", "seed=3", "--time=1:00:00"]
    said = CliRunner().invoke(tandem.main, ["submit", *words, "--comment=a=b", "--dry-run"])
    assert said.exit_code == 0, said.output
    for option in ("export=A=1", "exclusive", "time=1:00:00", "comment=a=b"):
        assert f"#SBATCH --{option}\n" in said.output
    uneven = CliRunner().invoke(tandem.main, ["submit", "demo", "--nodes", "3", "--dry-run"])
    assert "16 sequences cannot be dealt out to 3 x 1 ranks" in uneven.output
    wrong = CliRunner().invoke(tandem.main, ["submit", "demo", "--nodes", "2", "stpes=10"])
    assert (wrong.exit_code, wrong.output.count("\n")) == (1, 1)
    assert "did you mean steps" in wrong.output
    assert CliRunner().invoke(tandem.main, ["submit", "--nodes", "2", "demo"]).exit_code == 2


def test_chain(tmp_path):
    commands.submit("demo", Path("runs/demo"), "", chain=3)
    calls = (tmp_path / "bin/sbatch.calls").read_text().splitlines()
    assert ["--dependency=afterany:41" in call for call in calls] == [False, True, True]


def test_installed_nowhere(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(LaunchError, match="sbatch is not installed here"):
        commands.submit("demo", Path("runs/demo"), "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"chain": 0}, "--chain 0"),
        ({"chain": 2, "seeds": [1]}, "do not go together"),
        ({"seeds": [1, 2, 1]}, "--seeds 1,2,1: each seed"),
        ({"batches": [64, 96], "options": ["--nodes=2-4"]}, "64 sequences .* 3 x 1 ranks; .* 2-4"),
        ({"options": ["--nodes=4-2"]}, "nodes: 4-2"),
    ],
)
def test_refusals(arguments, words):
    with pytest.raises(LaunchError, match=words):
        commands.submit("demo", Path("runs/demo"), "", **arguments)


def test_run_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(LaunchError, match=r"runs/demo.*: Not a directory"):
        commands.submit("demo", Path("runs/demo"), "")
