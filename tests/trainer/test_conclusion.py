"""The results of a finished run, and how they are completed if it is killed while writing them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

import tandem
from data_pipeline import open_corpora
from tests.conftest import TINY_JOB
from tests.conftest import tandem as run_command
from trainer import run as conclusion
from trainer.checkpoint.attempts import Attempt
from trainer.evaluation import export, final_scores
from trainer.evaluation import finished as saved
from trainer.evaluation.export import export_learner
from trainer.evaluation.finished import SavedLearners
from trainer.run_folder import metrics
from trainer.run_folder.folder import RunFolder

LEARNERS = ("teacher", "students/distilbert", "students/tinybert")


@pytest.fixture
def ended(finished, tmp_path, monkeypatch) -> RunFolder:
    """A finished run that a test may change."""
    monkeypatch.setattr(final_scores, "SPEED_SECONDS", 0.0)
    shutil.copytree(finished[0], tmp_path / "tiny")
    return RunFolder(tmp_path / "tiny")


@pytest.fixture
def scored(monkeypatch) -> list[str]:
    """The names of what is evaluated and exported from here on, in order."""
    seen: list[str] = []
    evaluate, export = conclusion.evaluate_run, conclusion.export_learner

    def note_evaluation(*arguments, **more):
        seen.append("scores")
        return evaluate(*arguments, **more)

    def note_export(saved, name, *rest):
        seen.append(name)
        export(saved, name, *rest)

    monkeypatch.setattr(conclusion, "evaluate_run", note_evaluation)
    monkeypatch.setattr(conclusion, "export_learner", note_export)
    return seen


def cut(file: Path) -> None:
    """Truncate a file to half its size."""
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_what_is_missing_is_made_and_nothing_else(ended, scored, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr(
        saved, "open_corpora", lambda data: opened.append(data.path) or open_corpora(data)
    )
    whole = ended.report.read_text()
    assert conclusion.finalize(ended) == json.loads(ended.evaluation.read_text())
    assert scored == []
    ended.report.write_text("of a live run")
    os.utime(ended.report, ns=(0, ended.evaluation.stat().st_mtime_ns - 1))
    conclusion.finalize(ended)
    assert (ended.report.read_text(), scored) == (whole, [])
    for lost in (ended.export("students/tinybert"), ended.export("teacher") / "model.safetensors"):
        shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    conclusion.finalize(ended)
    assert scored == ["teacher", "students/tinybert"]
    assert not ended.missing_exports({"learners": {name: {} for name in LEARNERS}})
    assert RunFolder(ended.path / "none").missing_exports(
        {"learners": {"teacher": {"export_of_average": "exports/teacher.average"}}}
    ) == ["teacher"]
    scored.clear()
    opened.clear()
    cut(ended.evaluation)
    assert list(conclusion.finalize(ended)["learners"]) == list(LEARNERS)
    assert scored == ["scores", *LEARNERS]
    assert len(opened) == 1, "scores and exports share what is open"


def test_a_run_that_was_killed_before_its_report_gets_it_from_one_process(ended, corpus):
    ended.report.unlink()
    job = ["train", str(TINY_JOB), f"data.path={corpus}", f"output_dir={ended.path.parent}"]
    Attempt.begin(ended.path)  # this process, which would write it
    refused = run_command(*job)
    assert (refused.returncode, ended.report.exists()) == (1, False)
    assert f"{ended.path}: this run is already running" in refused.stderr
    done = CliRunner().invoke(tandem.main, job)
    assert done.exit_code == 0, done.output
    assert f"{ended.path} is finished" in done.output
    assert "students" in ended.report.read_text()


@pytest.mark.parametrize("words", [["data.validation=x"], ["--head", "x"], ["--seeds", "1"]])
def test_a_mistyped_folder_is_named_whatever_stands_beside_it(words):
    refused = CliRunner().invoke(tandem.main, ["evaluate", "runs/tinny", *words])
    assert refused.exit_code == 1
    assert "runs/tinny: not a run" in refused.stderr


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_another_learner_is_refused_by_its_option(finished, tmp_path, command):
    words = [str(finished[0]), "--learner", "small"]
    words += ["--out", str(tmp_path / "small")] if command == "export" else []
    refused = CliRunner().invoke(tandem.main, [command, *words])
    choices = "choose among: teacher, distilbert, tinybert"
    assert f"--learner: {finished[0]} has no small; {choices}" in refused.output
    assert refused.exit_code == 2


@pytest.mark.parametrize("learner", LEARNERS)
def test_an_export_has_the_final_figures_and_the_ids_of_its_tokenizer(finished, learner):
    from transformers import AutoConfig, AutoTokenizer

    run = RunFolder(finished[0])
    folder = run.export(learner)
    results = json.loads(run.evaluation.read_text())["learners"][learner]["corpora"]["data"]
    for kind in ("loss", "accuracy"):
        assert f"| {kind} | {results[kind]:.4f} |" in (folder / "README.md").read_text()
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for key in ("pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id"):
        assert getattr(config, key) == getattr(tokenizer, key) is not None
    assert (config.bos_token_id, config.eos_token_id) == (config.cls_token_id, config.sep_token_id)


def test_an_export_is_complete_once_all_of_its_files_are_written(ended, monkeypatch):
    """A kill before that leaves an export that the next start writes again."""
    complete = []
    results = json.loads(ended.evaluation.read_text())

    def watched(write):
        def watch(*arguments):
            complete.append("teacher" not in ended.missing_exports(results))
            return write(*arguments)

        return watch

    for step in ("save_pretrained", "_write_task_facts", "_write_modules"):
        monkeypatch.setattr(export, step, watched(getattr(export, step)))
    shutil.rmtree(ended.export("teacher"))
    conclusion.finalize(ended)
    assert complete == [False] * 3
    assert not ended.missing_exports(results)


def test_a_card_has_the_last_scores_where_a_run_goes_on(ended):
    """The final results belong to an earlier checkpoint then."""
    results = json.loads(ended.evaluation.read_text())
    ended.evaluation.write_text(json.dumps({**results, "step": 4}))
    out = ended.path / "out"

    export_learner(SavedLearners(ended), "teacher", out)
    newest = metrics.series(metrics.read(ended.metrics), "val/data/teacher/accuracy")[1][-1]
    assert f"| accuracy | {newest:.4f} |" in (out / "README.md").read_text()
