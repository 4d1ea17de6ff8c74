"""The main job through the real command line, on two ranks."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest
import torch

from tests.conftest import TINY_JOB, tandem
from tests.wandb_files import history
from trainer.run_folder import metrics

LEARNERS = ("teacher", "students/distilbert", "students/tinybert")


@pytest.fixture
def copied(finished, tmp_path):
    """The finished run, where a test may change it."""
    return shutil.copytree(finished[0], tmp_path / "tiny")


def test_every_learner_is_logged_scored_and_reported(finished):
    run, printed = finished
    rows = metrics.read(run / "metrics.jsonl")
    steps = [row for row in rows if "teacher/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 9))
    assert "students/tinybert/hidden_mse" in steps[0]
    assert "students/distilbert/loss" not in steps[1]
    assert "students/distilbert/cosine" in steps[2]  # it joined at the evaluation of step 2
    results = json.loads((run / "evaluation.json").read_text())
    assert list(results["learners"]) == list(LEARNERS)
    assert results["learners"]["students/distilbert"]["started_at"] == 2
    for name, facts in results["learners"].items():
        held_out = metrics.series(rows, f"val/data/{name}/loss")[1]
        assert facts["loss"] == pytest.approx(held_out[-1], rel=1e-5)
        assert name.removeprefix("students/") in printed
    report = (run / "report.html").read_text()
    assert "distilbert" in report
    assert "separately" in report
    assert "this run's logged steps" in report  # timed, not counted


def test_a_copied_student_begins_as_its_teacher(finished):
    """Half the teacher's layers with all of its embeddings predict far better than chance."""
    run, _ = finished
    rows = metrics.read(run / "metrics.jsonl")
    row = next(row for row in rows if "students/distilbert/mlm" in row)
    assert row["students/distilbert/mlm"] == pytest.approx(row["teacher/mlm"], rel=0.05)


@pytest.mark.parametrize("learner", LEARNERS)
def test_exports_load_in_transformers(finished, corpus, learner):
    """The logits equal ours, and the ids equal those in the corpus."""
    from tokenizers import Tokenizer
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    from model import from_pretrained

    folder = finished[0] / "exports" / learner.removeprefix("students/")
    theirs = AutoModelForMaskedLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = ["The [MASK] statement, once.", "An expression"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = theirs(batch.input_ids, attention_mask=batch.attention_mask).logits
        ours = from_pretrained(folder)(batch.input_ids, attention_mask=batch.attention_mask).logits
    attended = batch.attention_mask.bool()
    assert (ours - expected)[attended].abs().max() < 1e-5
    built_with = Tokenizer.from_file(str(corpus / "tokenizer" / "tokenizer.json"))
    assert tokenizer(texts).input_ids == [built_with.encode(text).ids for text in texts]
    assert "## Held-out text of " in (folder / "README.md").read_text()


def test_every_file_of_a_run_follows_the_umask(finished):
    os.umask(mask := os.umask(0))
    for path in finished[0].rglob("*"):
        assert path.stat().st_mode & 0o777 & ~0o111 == 0o666 & ~mask, path


def test_time_and_bytes_are_logged_and_a_trace_is_written(finished):
    run, _ = finished
    row = next(row for row in metrics.read(run / "metrics.jsonl") if "seconds" in row)
    assert row["students/tinybert/seconds_backward"] > 0
    assert row["teacher/bytes_communication"] > 0
    assert (row["restarts"], "mfu" in row) == (0, False)
    for rank in (0, 1):
        trace = json.loads((run / "profile" / f"rank-{rank:03d}.json").read_text())
        assert any(event.get("name") == "aten::addmm" for event in trace["traceEvents"])


def test_sync_makes_one_complete_offline_run_of_it(copied):
    """Weights & Biases' own records, read back: every logged step once, in order."""
    run = copied
    for _ in range(2):
        done = tandem("sync", run)
        assert done.returncode == 0, done.stderr
        assert "wandb sync" in done.stdout
        steps = sorted({int(row["step"]) for row in metrics.read(run / "metrics.jsonl")})
        assert list(history(run)) == steps
    assert history(run)[8]["val/data/teacher/loss"] > 0
    (run / "logs/wandb.log").unlink()
    (run / "logs/wandb.log").mkdir()
    refused = tandem("sync", run)
    assert refused.returncode == 1
    assert "Is a directory" in refused.stderr
    assert refused.stderr.endswith("Weights & Biases was not started, as the line above says\n")


def test_a_finished_run_says_so(copied, corpus):
    run = copied
    again = tandem(
        "train", TINY_JOB, f"data.path={corpus}", f"output_dir={run.parent}", "--nproc", 2,
        "log.notes=later", "checkpoint.keep=9", "teacher.optimizer.learning_rate=1",
    )  # fmt: skip
    assert again.returncode == 0
    assert f"{run} is finished" in again.stdout
    assert json.loads((run / "attempts/000001.json").read_text())["finished"]
    assert "report.html" in again.stdout
    assert re.search(r"changed since, without effect: .*; and 1 more; for another", again.stderr)
