"""Fixtures of the whole suite: a small corpus of real prose, and the command line."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import settings

from tests.fork_server import REPOSITORY, run_command
from tests.shared import SharedFolders

pytest_plugins = ["tests.order", "tests.timeouts"]

# A slow machine fails no test. One that hangs is caught by `tests.timeouts`.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

TINY_JOB = Path(__file__).with_name("tiny_job.yaml")

gc.disable()  # a quarter of the time that the imports of all tests take


def pytest_collection_finish() -> None:
    """From here on collect garbage, but never look at what is imported: a sixth of the time."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _no_rank_is_a_fork_of_a_worker() -> Iterator[None]:
    """A worker has threads, whose locks a fork may find held for ever; `tandem` is without any."""

    def refuse(rank: Callable[[], int]) -> NoReturn:
        os.write(2, b"a test started ranks in its own process: use tests.conftest.tandem\n")
        os._exit(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("commands.training._leave_as_fork", refuse)
        yield


def tandem(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the real command line in a process of its own, with all imports already done.

    With ``CUDA_VISIBLE_DEVICES="0"`` and a build of torch for CUDA it is a new program: what has
    been imported chose the CPU.
    """
    import torch

    words, variables = [str(word) for word in arguments], command_environment(**environment)
    if variables["CUDA_VISIBLE_DEVICES"] and torch.version.cuda is not None:
        program = [sys.executable, "-m", "tandem", *words]
        return subprocess.run(program, env=variables, capture_output=True, text=True, timeout=300)
    code, output, errors = run_command(words, variables, 300)
    return subprocess.CompletedProcess(["tandem", *words], code, output, errors)


def command_environment(**changes: str) -> dict[str, str]:
    """The environment of a user's shell, without launcher variables, W&B key and GPUs."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "WANDB")) and name not in ("RANK", "WORLD_SIZE")
    }
    own = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**kept, **own, **changes}


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> SharedFolders:
    """``shared(name, make)``: a folder that is made once for all workers."""
    return SharedFolders.of(tmp_path_factory)


@pytest.fixture(scope="session")
def text(shared: SharedFolders) -> Path:
    """Python's own reference text, as documents made of paragraphs."""

    def make(folder: Path) -> None:
        from pydoc_data.topics import topics

        documents = [topics[name] for name in sorted(topics)][:60]
        whole = "\n\n".join("\n".join(d.split("\n\n")) for d in documents)
        (folder / "topics.txt").write_text(whole)

    return shared("text", make) / "topics.txt"


@pytest.fixture(scope="session")
def corpus(text: Path, shared: SharedFolders) -> Path:
    """A corpus of `text` with a vocabulary of 600 tokens."""

    def make(folder: Path) -> None:
        sizes = ["--kind", "wordpiece", "--vocab-size", 600, "--out", folder / "tokenizer"]
        trained = tandem("tokenizer", "train", text, *sizes)
        assert trained.returncode == 0, trained.stderr
        options = ["--tokenizer", folder / "tokenizer", "--val-fraction", 0.1]
        built = tandem("data", "build", text, *options, "--out", folder / "data")
        assert built.returncode == 0, built.stderr

    return shared("corpus", make) / "data"


@pytest.fixture(scope="session")
def finished(corpus: Path, shared: SharedFolders) -> tuple[Path, str]:
    """The tiny job on two ranks, run to its end: its folder, and what it printed."""

    def make(folder: Path) -> None:
        job = ["train", TINY_JOB, f"data.path={corpus}", f"output_dir={folder}", "--nproc", 2]
        done = tandem(*job, "profile.steps=5:7")
        assert done.returncode == 0, done.stderr
        (folder / "printed").write_text(done.stdout)

    folder = shared("finished", make)
    return folder / "tiny", (folder / "printed").read_text()
