"""The main job through the real command line, on two ranks."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import TINY_JOB, command_environment, tandem
from tests.wandb_files import history
from trainer.record import metrics

LEARNERS = ("teacher", "students/distilbert", "students/tinybert")
STOPPED = 75


def arguments(corpus: Path, runs: Path, *more: str) -> list[str]:
    return ["train", str(TINY_JOB), f"data.path={corpus}", f"runs={runs}", "--nproc", "2", *more]


def losses(run: Path) -> list[tuple[str, float]]:
    """Every loss and every held-out score of a run, in order."""
    return [
        (f"{row['step']} {key}", value)
        for row in metrics.read(run / "metrics.jsonl")
        for key, value in row.items()
        if not metrics.is_measured(key)
    ]


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory):
    """An undisturbed run: its folder, and what it printed."""
    runs = tmp_path_factory.mktemp("undisturbed")
    done = tandem(*arguments(corpus, runs, "profile.steps=5:7"))
    assert done.returncode == 0, done.stderr
    return runs / "tiny", done.stdout


def test_every_learner_is_logged_scored_and_reported(finished):
    run, printed = finished
    rows = metrics.read(run / "metrics.jsonl")
    steps = [row for row in rows if "teacher/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 9))
    assert "students/tinybert/hidden" in steps[0]
    assert "students/distilbert/loss" not in steps[1]
    assert "students/distilbert/cosine" in steps[2]  # it joined at the evaluation of step 2
    results = json.loads((run / "evaluation.json").read_text())
    assert list(results["learners"]) == list(LEARNERS)
    assert results["learners"]["students/distilbert"]["started_at"] == 2
    for name, facts in results["learners"].items():
        held_out = metrics.series(rows, f"val/data/{name}/loss")[1]
        assert facts["loss"] == pytest.approx(held_out[-1], rel=1e-5)
        assert name.removeprefix("students/") in printed
    assert "distilbert" in (run / "report.html").read_text()


def test_a_copied_student_begins_as_its_teacher(finished):
    """Half the teacher's layers, but all of its embeddings, predict far better than chance."""
    run, _ = finished
    rows = metrics.read(run / "metrics.jsonl")
    row = next(row for row in rows if "students/distilbert/mlm" in row)
    assert row["students/distilbert/mlm"] == pytest.approx(row["teacher/mlm"], rel=0.05)


@pytest.mark.parametrize("learner", LEARNERS)
def test_exports_load_in_transformers(finished, corpus, learner):
    """Logits are ours, and ids are those that the corpus was built with."""
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
    assert "## Held-out text" in (folder / "README.md").read_text()


def test_time_and_bytes_are_logged_and_a_trace_is_written(finished):
    run, _ = finished
    row = next(row for row in metrics.read(run / "metrics.jsonl") if "seconds" in row)
    assert row["students/tinybert/seconds_backward"] > 0
    assert row["teacher/bytes_communication"] > 0
    assert (row["restarts"], "mfu" in row) == (0, torch.cuda.is_available())
    for rank in (0, 1):
        trace = json.loads((run / "profile" / f"rank-{rank:03d}.json").read_text())
        assert any(event.get("name") == "aten::addmm" for event in trace["traceEvents"])


def test_sync_makes_one_complete_offline_run_of_it(finished):
    """Weights & Biases' own records, read back: every logged step once, in order."""
    run, _ = finished
    for _ in range(2):
        done = tandem("sync", run)
        assert done.returncode == 0, done.stderr
        assert "wandb sync" in done.stdout
        steps = sorted({int(row["step"]) for row in metrics.read(run / "metrics.jsonl")})
        assert list(history(run)) == steps
    assert history(run)[8]["val/data/teacher/loss"] > 0


def test_torchrun_by_hand(corpus, tmp_path):
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tandem"]
    job = ["train", str(TINY_JOB), f"data.path={corpus}", f"runs={tmp_path}", "steps=2"]
    done = subprocess.run(
        [sys.executable, *torchrun, *job],
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = metrics.read(tmp_path / "tiny" / "metrics.jsonl")
    assert rows[-1]["step"] == 2
    assert len(list((tmp_path / "tiny" / "logs").glob("rank-*.log"))) == 2


def test_a_finished_run_says_so(finished, corpus):
    run, _ = finished
    again = tandem(*arguments(corpus, run.parent))
    assert again.returncode == 0
    assert f"{run} is finished" in again.stdout
    assert "report.html" in again.stdout


def start(corpus: Path, runs: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tandem", *arguments(corpus, runs)],
        env=command_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def wait_for_step(run: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        rows = metrics.read(run / "metrics.jsonl")
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.02)


def test_killed_and_started_again_it_is_the_same_run(finished, corpus, tmp_path):
    """SIGKILL at a random step: the losses afterwards equal the undisturbed run's to the bit."""
    process = start(corpus, tmp_path)
    wait_for_step(tmp_path / "tiny", random.randint(1, 6), process)
    process.kill()
    process.wait()
    again = tandem(*arguments(corpus, tmp_path))
    assert again.returncode == 0, again.stderr
    assert losses(tmp_path / "tiny") == losses(finished[0])


def test_interrupted_it_saves_and_goes_on(finished, corpus, tmp_path):
    """Ctrl-C: exit code 75 with everything saved; the same command goes on, to the bit."""
    process = start(corpus, tmp_path)
    wait_for_step(tmp_path / "tiny", 3, process)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=120) == STOPPED
    assert b"start it again to go on" in process.stdout.read()
    last = metrics.read(tmp_path / "tiny" / "metrics.jsonl")[-1]["step"]
    assert (tmp_path / "tiny" / "checkpoints" / f"step-{int(last):09d}").is_dir()
    again = tandem(*arguments(corpus, tmp_path))
    assert again.returncode == 0, again.stderr
    assert f"going on from step {int(last)}" in again.stdout
    assert losses(tmp_path / "tiny") == losses(finished[0])
