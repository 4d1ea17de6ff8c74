"""SIGKILL, at any instant, of one rank, all ranks or the launcher: nothing is lost, nothing stays.

The real job through the real launcher. Half of the kills hit a rank inside of a save, before an act
on the checkpoint folder (`tests.faults.killed`); the others come from outside at a random moment.
After every one no process of the job is left; the run is started again until it ends, and its
losses are those of a run that nobody disturbed, to the last bit.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.jobs import LAUNCH, arguments, losses, processes_of, run, start, until

FEW = (
    *("steps=240", "checkpoint.every=2", "evaluation.every=60", "batch.micro_batch=4"),
    "students.distilbert.zero_stage=0",
)
CLEARED = 20.0  # seconds until no process is left; a killed launcher's ranks die at once


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    runs = tmp_path_factory.mktemp("undisturbed")
    process = start(corpus, runs, *FEW)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return losses(runs / "tiny")


class Killer:
    """Starts the job and kills something of it, over and over, as its seed says."""

    def __init__(self, corpus: Path, runs: Path, seed: int) -> None:
        self.corpus, self.runs, self.folder = corpus, runs, runs / "tiny"
        self.chance = random.Random(seed)
        self.deaths = 0

    def kill_inside_a_save(self) -> None:
        rank = self.chance.randrange(2)
        event = self.chance.randrange(1, 12 if rank else 60)  # rank 1 only writes its own files
        child = [sys.executable, "-m", "tests.faults.killed", str(rank), str(event)]
        process = run(
            [sys.executable, "-c", LAUNCH, *child, *arguments(self.corpus, self.runs, *FEW)]
        )
        _, errors = process.communicate(timeout=300)
        if process.returncode == 0:  # it reached its end before
            return
        assert process.returncode == 128 + signal.SIGKILL, errors
        assert errors.strip().endswith(f"rank {rank} was ended by SIGKILL")
        assert "Traceback" not in errors
        self.see_that_nothing_is_left()

    def kill_from_outside(self) -> None:
        process = start(self.corpus, self.runs, *FEW)
        began = self.rows()
        if self.chance.random() < 0.8:  # the others: while it starts
            until(lambda: process.poll() is not None or self.rows() != began)
        time.sleep(self.chance.random() * 0.5)
        victim = self.chance.choice(["launcher", "all ranks", "a rank"])
        ranks = children(process)
        chosen = {"launcher": [process.pid], "all ranks": ranks}.get(victim, ranks[:1])
        for pid in chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=300)
        self.see_that_nothing_is_left()

    def see_that_nothing_is_left(self) -> None:
        self.deaths += 1
        until(lambda: not processes_of(self.runs), CLEARED)

    def go_on_to_the_end(self) -> None:
        process = start(self.corpus, self.runs, *FEW)
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
        assert not processes_of(self.runs)

    def rows(self) -> int:
        file = self.folder / "metrics.jsonl"
        return file.stat().st_size if file.exists() else 0


def children(process: subprocess.Popen[str]) -> list[int]:
    try:
        return [
            *map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []


def disturb(killer: Killer, kills: int) -> None:
    for number in range(kills):
        if number % 2:
            killer.kill_from_outside()
        else:
            killer.kill_inside_a_save()
    killer.go_on_to_the_end()


def test_a_few_kills(undisturbed, corpus, tmp_path):
    killer = Killer(corpus, tmp_path, seed=0)
    disturb(killer, 3)
    assert killer.deaths == 3
    assert losses(killer.folder) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_more_than_fifty_kills(undisturbed, corpus, tmp_path, seed):
    killer = Killer(corpus, tmp_path, seed)
    disturb(killer, 11)
    assert killer.deaths >= 10
    assert losses(killer.folder) == undisturbed
