"""Fixtures of the whole suite: a small corpus of real prose, and the command line."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import settings

from tests.fork_server import REPOSITORY, run_command

pytest_plugins = ["tests.order", "tests.timeouts"]

# A slow machine fails no test. One that hangs is caught by `tests.timeouts`.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

TINY_JOB = Path(__file__).with_name("tiny_job.yaml")


def tandem(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the real command line in a process of its own, with all imports already done."""
    words = [str(word) for word in arguments]
    code, output, errors = run_command(words, command_environment(**environment), 300)
    return subprocess.CompletedProcess(["tandem", *words], code, output, errors)


def command_environment(**changes: str) -> dict[str, str]:
    """The environment of a user's shell, without launcher variables and W&B key."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "WANDB")) and name not in ("RANK", "WORLD_SIZE")
    }
    return {**kept, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **changes}


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """Python's own reference text, as documents made of paragraphs."""
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("text") / "topics.txt"
    documents = [topics[name] for name in sorted(topics)][:60]
    path.write_text("\n\n".join("\n".join(d.split("\n\n")) for d in documents))
    return path


@pytest.fixture(scope="session")
def corpus(text, tmp_path_factory) -> Path:
    """A corpus of `text` with a vocabulary of 600 tokens."""
    folder = tmp_path_factory.mktemp("corpus")
    sizes = ["--kind", "wordpiece", "--vocab-size", 600]
    assert tandem("tokenizer", "train", text, *sizes, "--out", folder / "tokenizer").returncode == 0
    options = ["--tokenizer", folder / "tokenizer", "--val-fraction", 0.1]
    built = tandem("data", "build", text, *options, "--out", folder / "data")
    assert built.returncode == 0, built.stderr
    return folder / "data"


@pytest.fixture(scope="session")
def finished(corpus, tmp_path_factory) -> tuple[Path, str]:
    """The tiny job on two ranks, run to its end: its folder, and what it printed."""
    runs = tmp_path_factory.mktemp("finished")
    job = ["train", TINY_JOB, f"data.path={corpus}", f"output_dir={runs}", "--nproc", 2]
    done = tandem(*job, "profile.steps=5:7")
    assert done.returncode == 0, done.stderr
    return runs / "tiny", done.stdout
