"""The real job at the smallest size, on two ranks, and what is watched of it from outside."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cluster.local import launch
from tests.conftest import TINY_JOB, command_environment
from tests.faults import sabotaged
from tests.fork_server import Program, command_line
from tests.waiting import until
from trainer.run_folder import metrics

STOPPED = 75
LIMIT = 300.0  # seconds for a job to reach something; it takes about 20

Job = Program | subprocess.Popen


def arguments(corpus: Path, runs: Path, *more: str) -> list[str]:
    return ["train", str(TINY_JOB), f"data.path={corpus}", f"output_dir={runs}", *more]


def start(corpus: Path, runs: Path, *more: str) -> Program:
    """`tandem train` on two ranks, but for its imports."""
    words = [*arguments(corpus, runs, *more), "--nproc", "2"]
    return Program(command_line, words, environment=command_environment(), folder=runs)


def start_sabotaged(kind: str, corpus: Path, runs: Path, *more: str) -> Program:
    """The same, with ranks on which a fault is injected (`tests.faults.sabotaged`)."""
    return start_ranks(partial(sabotaged.sabotage, kind), arguments(corpus, runs, *more), runs)


def start_ranks(prepare: Callable[[], object], words: list[str], folder: Path) -> Program:
    """``tandem WORDS`` on two ranks, each of which calls `prepare` before."""
    environment = command_environment()
    return Program(_launch, prepare, words, environment=environment, folder=folder)


def _launch(prepare: Callable[[], object], words: list[str]) -> None:
    sys.exit(launch(partial(as_rank, prepare, words), 2))


def as_rank(prepare: Callable[[], object], words: list[str]) -> int:
    """One rank of ``tandem WORDS``, whose place is in the environment."""
    prepare()
    command_line(words)
    return 0


def start_program(words: list[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
    """``python WORDS``."""
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=command_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: Job) -> tuple[int, str]:
    """Wait until it exits without being told to; returns its exit code and its error output."""
    _, errors = process.communicate(timeout=LIMIT)
    return process.returncode, errors


def finish(process: Job) -> str:
    """Wait until it has finished all of its work; returns its error output."""
    code, errors = end(process)
    assert code == 0, errors
    return errors


def losses(folder: Path) -> list[tuple[str, float]]:
    """Every loss and every held-out score of a run, in order."""
    return [
        (f"{row['step']} {key}", value)
        for row in metrics.read(folder / "metrics.jsonl")
        for key, value in row.items()
        if not metrics.is_measured(key)
    ]


def newest_step(folder: Path) -> int:
    """The newest step in the metrics of a run; 0 before the first."""
    rows = metrics.read(folder / "metrics.jsonl")
    return int(rows[-1]["step"]) if rows else 0


def reach(process: Job, folder: Path, step: int) -> None:
    """Wait until a run has reached a step."""

    def reached() -> bool:
        assert process.poll() is None, process.communicate(timeout=LIMIT)
        return newest_step(folder) >= step

    until(reached, f"step {step}", LIMIT)


def processes_of(folder: Path) -> list[int]:
    """The processes that a job in this folder has left: all that work in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "cwd").readlink().is_relative_to(folder):
                    found.append(int(entry.name))
    return found
