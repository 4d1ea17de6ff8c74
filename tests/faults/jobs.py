"""The real job at the smallest size, started as a user starts it, on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY, TINY_JOB, command_environment
from tests.waiting import until
from trainer.run_folder import metrics

STOPPED = 75
LIMIT = 300.0  # seconds for a job to reach something; it takes about 20
LAUNCH = (
    "import sys; from cluster.local import becoming, launch; "
    "sys.exit(launch(becoming(sys.argv[1:]), 2))"
)


def arguments(corpus: Path, runs: Path, *more: str) -> list[str]:
    return ["train", str(TINY_JOB), f"data.path={corpus}", f"output_dir={runs}", *more]


def start(corpus: Path, runs: Path, *more: str) -> subprocess.Popen[str]:
    """`tandem train`, on two ranks."""
    return run(tandem_command(*arguments(corpus, runs, *more)))


def tandem_command(*words: str) -> list[str]:
    return [sys.executable, "-m", "tandem", *words, "--nproc", "2"]


def start_sabotaged(kind: str, corpus: Path, runs: Path, *more: str) -> subprocess.Popen[str]:
    """The same, with ranks on which a fault is injected (`tests.faults.sabotaged`)."""
    rank = [sys.executable, "-m", "tests.faults.sabotaged", kind, *arguments(corpus, runs, *more)]
    return run([sys.executable, "-c", LAUNCH, *rank])


def run(command: list[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=command_environment(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait until it exits without being told to; returns its exit code and its error output."""
    _, errors = process.communicate(timeout=LIMIT)
    return process.returncode, errors


def finish(process: subprocess.Popen[str]) -> str:
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


def reach(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Wait until a run has reached a step."""

    def reached() -> bool:
        assert process.poll() is None, process.communicate(timeout=LIMIT)
        return newest_step(folder) >= step

    until(reached, f"step {step}", LIMIT)


def processes_of(folder: Path) -> list[int]:
    """The processes whose command line contains this folder's name."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in command:
                found.append(int(entry.name))
    return found
