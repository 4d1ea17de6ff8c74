"""No command and no rule of make overwrites or removes a file that it did not write."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import model
import tandem
from data_pipeline.shards.locking import unfinished
from data_pipeline.text import system_prose as machine_text
from data_pipeline.tokenization.tokenizer import TOKENIZER_FILES
from model.hugging_face.files import MODEL_FILES
from tests.conftest import REPOSITORY

MINE = b"years of work"
SMALL = {"vocab_size": 30, "hidden_size": 8, "layers": 1, "heads": 2, "max_positions": 16}


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(tandem.main, [str(argument) for argument in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def refused(path: Path, *arguments: object) -> None:
    """The command fails with a line that begins with the file, and leaves the file unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(MINE)
    before = sorted(path.parent.iterdir())
    code, output = run(*arguments)
    assert code == 1, output
    assert output.startswith(f"tandem: {path}: exists"), output
    assert len(output.splitlines()) == 1
    assert path.read_bytes() == MINE
    assert sorted(path.parent.iterdir()) == before
    path.unlink()


def test_what_dead_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    dead = [f".o.jsonl.a-host-{pid}-0a1b2c3d.part" for pid in (1, os.getpid())]
    others = [".o.jsonl.part", ".o.jsonl.mine.part", ".x.jsonl.host-1-0a1b2c3d.part"]
    for name in (*dead, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows").write_bytes(MINE)
        os.utime(tmp_path / name, (0, 0))
    with unfinished(tmp_path / "o.jsonl") as first:
        os.utime(first, (0, 0))
        with unfinished(tmp_path / "o.jsonl") as second:  # as in a container of the same host name
            assert first != second
            assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
                [first.name, second.name, *others]
            )
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_what_earlier_versions_left_is_removed_after_a_day(tmp_path: Path) -> None:
    left = [".o.jsonl.4242.part", ".o.jsonl.forking-0a1b2c3d"]
    (tmp_path / left[0]).write_bytes(MINE)
    (tmp_path / left[1]).mkdir()
    (tmp_path / left[1] / "metrics.jsonl").write_bytes(MINE)
    for age, names in ((3600, left), (2 * 86400, [])):  # a younger one may be written
        for name in left:
            os.utime(tmp_path / name, (time.time() - age,) * 2)
        with unfinished(tmp_path / "o.jsonl"):
            pass
        assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_tokenizer_train(tmp_path: Path, name: str) -> None:
    (tmp_path / "text.txt").write_text("a river and a stone\n\na house\n")
    out = tmp_path / "out"
    sizes = ["--kind", "wordpiece", "--vocab-size", 40]
    refused(out / name, "tokenizer", "train", tmp_path / "text.txt", *sizes, "--out", out)


@pytest.mark.parametrize("name", [*MODEL_FILES, *TOKENIZER_FILES])
def test_import_and_export(tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    refused(out / name, "import", tmp_path / "theirs", "--out", out)
    refused(out / name, "export", tmp_path / "run", "--learner", "teacher", "--out", out)


def test_a_model_is_not_imported_over_itself(tmp_path: Path) -> None:
    model.save_pretrained(model.build(model.EncoderConfig(**SMALL), seed=0), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    code, output = run("import", tmp_path, "--out", tmp_path)
    assert (code, len(output.splitlines())) == (1, 1)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_dump_replaces_dumps_only(corpus: Path, tmp_path: Path) -> None:
    (config := tmp_path / "data.yaml").write_text(f"path: {corpus}\nsequence_length: 64\n")
    out = tmp_path / "out" / "rows.npz"
    dump = ["data", "dump", config, "--out", out, "--steps"]
    refused(out, *dump, "0:1")
    np.savez(out, mine=np.arange(3))
    assert run(*dump, "0:1")[0] == 1
    out.unlink()
    for last in (1, 2):
        assert run(*dump, f"0:{last}")[0] == 0
        assert set(np.load(out)["step"]) == set(range(last))
    assert list(out.parent.iterdir()) == [out]


def test_predictions_replace_no_file_nor_their_input(tmp_path: Path) -> None:
    """Nothing is predicted first: there is no model at all."""
    refused(path := tmp_path / "rows.tsv", "predict", tmp_path / "none", path, "--out", path)
    (folder := tmp_path / "folder").mkdir()
    code, output = run("predict", tmp_path / "none", path, "--out", folder)
    assert (code, output.partition(";")[0]) == (1, f"tandem: {folder}: exists")
    code, output = run("predict", tmp_path / "none", path, "--out", lost := tmp_path / "no" / "out")
    assert (code, output) == (1, f"tandem: {lost}: No such file or directory\n")


@pytest.mark.parametrize("name", ["analysis.json", "analysis.html"])
def test_an_analysis_replaces_analyses_only(tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    refused(out / name, "analyze", tmp_path / "none", tmp_path / "text.txt", "--out", out)
    found = {"model": str(tmp_path / "none"), "examples": "t.txt", "scored": "", "patterns": {}}
    out.joinpath("analysis.json").write_text(json.dumps(found))
    assert "exists" not in run("analyze", tmp_path / "none", "t.txt", "--out", out)[1]


@pytest.mark.parametrize("name", ["suite.json", "report.html"])
def test_a_suite_replaces_files_of_suites_only(tmp_path: Path, name: str) -> None:
    model.save_pretrained(model.build(model.EncoderConfig(**SMALL), seed=0), tmp_path / "m")
    (tmp_path / "suite.yaml").write_text("about: No tasks.\nminimal_pairs: {pairs: p.jsonl}\n")
    (tmp_path / "p.jsonl").write_text("")
    words = ["--suite", tmp_path / "suite.yaml", tmp_path / "m", f"data.root={tmp_path}"]
    refused(tmp_path / "out" / name, "evaluate", *words, "--out", tmp_path / "out")


@pytest.mark.parametrize("text", ['{"x"', "[1]", "\x00"])
def test_a_record_of_models_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    model.save_pretrained(model.build(model.EncoderConfig(**SMALL), seed=0), tmp_path / "m")
    (tmp_path / "suite.yaml").write_text("about: No tasks.\nminimal_pairs: {pairs: p.jsonl}\n")
    (tmp_path / "models.json").write_text(text)
    words = ["--suite", tmp_path / "suite.yaml", tmp_path / "m", "--out", tmp_path]
    code, output = run("evaluate", *words)
    assert (code, len(output.splitlines())) == (1, 1)
    assert output.startswith(f"tandem: {tmp_path / 'models.json'}: damaged, or not of a suite")


def test_the_text_of_the_demo(tmp_path: Path) -> None:
    (path := tmp_path / "text.txt").write_bytes(MINE)
    with pytest.raises(SystemExit, match=rf"{path}: exists"):
        machine_text.main(["--out", str(path)])
    assert path.read_bytes() == MINE


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_rules_of_make(tmp_path: Path) -> None:
    shutil.copyfile(REPOSITORY / "Makefile", tmp_path / "Makefile")
    shutil.copyfile(REPOSITORY / "pyproject.toml", tmp_path / "pyproject.toml")
    (tmp_path / "constraints.txt").touch()
    mine = [tmp_path / ".venv" / "mine.txt", tmp_path / "runs" / "demo-data" / "mine.txt"]
    for path in mine:
        path.parent.mkdir(parents=True)
        path.write_bytes(MINE)

    def make(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "PYTHON=python3", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    failed = make("setup")
    assert failed.returncode != 0
    assert ".venv: not a virtual environment" in failed.stdout
    for name in ("python", "tandem"):
        tool = tmp_path / ".venv" / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text("#!/bin/sh\necho $0 $*\n")
        tool.chmod(0o755)
    os.utime(tmp_path / "constraints.txt", (0, 0))
    os.utime(tmp_path / "pyproject.toml", (0, 0))
    (tmp_path / ".venv" / ".ready").touch()
    (tmp_path / "runs" / "demo-text.txt").touch()
    (tmp_path / "runs" / "demo-tokenizer").mkdir()
    (tmp_path / "runs" / "demo-tokenizer" / "tokenizer.json").touch()
    made = make("demo")
    assert "data build" in made.stdout, made.stderr
    assert [path.read_bytes() for path in mine] == [MINE, MINE]
