"""The sections of `gpu.py` that are commands: a real job with two students, and the GPU tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu_facts import ROOT, Row
from trainer.run_folder import metrics

ON_GPU = torch.cuda.is_available()
# The demo on a GPU: BERT-base, DistilBERT as a copy of half of it, and TinyBERT-4.
LARGE = (
    *("teacher.model=bert_base", "teacher.precision=bf16_weights"),
    *("teacher.optimizer.learning_rate=1e-3", "teacher.optimizer.adamw_learning_rate=3e-4"),
    *("students.distilbert.model=distilbert", "students.distilbert.precision=bf16_weights"),
    "students.distilbert.init.teacher_layers=[0,2,4,7,9,11]",
    *("students.tinybert.model=tinybert_4", "students.tinybert.precision=bf16"),
    *("batch.size=256", "batch.micro_batch=128", "steps=60"),
)
BEGINS = "students.distilbert.start={step: 10, fraction: null, teacher: null}"
SMALL = ("steps=20", "evaluation.every=10")
TESTERS = 12  # processes that test at once on one GPU


def job(out: Path, seconds: float) -> Iterator[Row]:
    """A job with two students on the text of these pages: from text to exports."""
    with tempfile.TemporaryDirectory() as work:
        yield from job_in(Path(work), out, time.monotonic() + seconds)


def job_in(work: Path, out: Path, until: float) -> Iterator[Row]:
    """The job with its corpus and run in the folder `work`, until this time of the clock."""
    text, tokenizer, corpus = work / "text.txt", work / "tokenizer", work / "corpus"
    pages = sorted(ROOT.glob("docs/**/*.md"))
    text.write_text("\n\n".join(page.read_text(encoding="utf-8") for page in pages))
    tandem = [sys.executable, "-m", "tandem"]
    sizes = ["--kind", "wordpiece", "--vocab-size", "4096"]
    parts = ["--tokenizer", tokenizer, "--out", corpus, "--val-fraction", "0.03"]
    paths = [f"data.path={corpus}", f"output_dir={work}", "log.wandb=disabled", BEGINS]
    for command in (
        [*tandem, "tokenizer", "train", text, *sizes, "--out", tokenizer],
        [*tandem, "data", "build", text, *parts],
        [*tandem, "train", "demo", *paths, *(LARGE if ON_GPU else SMALL)],
    ):
        began = time.monotonic()
        run(command, out / "job.log", until - began)
        yield " ".join(str(word) for word in command[2:5]), f"{time.monotonic() - began:.0f} s"
    rows = metrics.read(work / "demo/metrics.jsonl")
    for key in ("tokens_per_second", "mfu", "teacher/loss", "students/tinybert/loss"):
        steps, values = metrics.series(rows, key)
        if values:
            what = f"the job's {key}, step {steps[0]} to {steps[-1]}"
            yield (what, f"{values[0]:.4g} to {values[-1]:.4g}")
    for name in ("metrics.jsonl", "report.html"):
        shutil.copy(work / "demo" / name, out)


def tests(out: Path, seconds: float) -> Iterator[Row]:
    """The GPU tests; without a GPU those of `tests/test_gpu.py` that a CPU can run."""
    log = out / "tests.log"
    which = ["-m", "gpu", "-n", str(TESTERS), "tests/model/test_mechanics.py"] if ON_GPU else []
    run([sys.executable, "-m", "pytest", "-q", *which, "tests/test_gpu.py"], log, seconds)
    yield "tests", re.sub(r"=+", "", log.read_text(encoding="utf-8").splitlines()[-1]).strip()


def run(command: list[object], log: Path, seconds: float) -> None:
    """Run a command, whose output goes to the log; RuntimeError where it fails or takes longer."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [str(word) for word in command]
    with log.open("ab") as output:
        try:
            done = subprocess.run(
                words, cwd=ROOT, env=environment, stdout=output, stderr=output, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"stopped after {seconds:.0f} s: {' '.join(words[1:5])}") from None
    if done.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"exit {done.returncode}: {''.join(last)[:200]}")
