"""SIGKILL, at any instant, of one rank, all ranks or the launcher: nothing is lost or left behind.

The real job through the real launcher. Half of the kills hit a rank inside a save, in each of its
phases in turn (`tests.faults.killed`); the others come from outside at a random moment. After each
kill no process of the job is left. The run is restarted until it ends, and its losses equal those
of an undisturbed run to the last bit.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from cluster.local import KILLED
from tests.faults.jobs import (
    LIMIT,
    STOPPED,
    Job,
    arguments,
    end,
    finish,
    losses,
    processes_of,
    start,
    start_program,
    start_ranks,
    start_sabotaged,
)
from tests.faults.killed import PHASES, kill_in
from tests.faults.sabotaged import STEP
from tests.waiting import until
from trainer.checkpoint.folder import all_steps

MANY = (
    *("steps=600", "checkpoint.every=2", "evaluation.every=150", "batch.micro_batch=4"),
    "students.distilbert.zero_stage=0",
)
CLEARED = 20.0  # seconds until no process is left; a killed launcher's ranks die at once


class Killer:
    """Starts the job and kills part of it, repeatedly, as determined by its seed."""

    def __init__(self, corpus: Path, runs: Path, seed: int, settings: tuple[str, ...] = ()) -> None:
        self.folder, self.runs = runs / "tiny", runs
        self.job = arguments(corpus, runs, *settings)
        self.start = partial(start, corpus, runs, *settings)
        self.chance = random.Random(seed)
        self.deaths = 0

    def kill_inside_a_save(self, phase: str, saves: int) -> None:
        """Kill a rank inside a save, some saves from now."""
        rank = self.chance.randrange(2) if phase == "tensors" else 0  # 1 writes nothing else
        number = self.chance.randint(1, saves)
        process = start_ranks(partial(kill_in, rank, phase, number), self.job, self.runs)
        code, errors = end(process)
        if code == 0:  # it reached its end before
            return
        assert code == 128 + signal.SIGKILL, errors
        assert errors.strip().endswith(f"rank {rank} was ended by SIGKILL{KILLED}")
        assert "Traceback" not in errors
        self.see_that_nothing_is_left()

    def kill_from_outside(self) -> None:
        process = self.start()
        began = self.rows()
        if self.chance.random() < 0.8:  # the others: while it starts
            until(lambda: process.poll() is not None or self.rows() != began, "a row", LIMIT)
        time.sleep(self.chance.random() * 0.3)
        victim = self.chance.choice(["launcher", "all ranks", "a rank"])
        ranks = children(process)
        chosen = {"launcher": [process.pid], "all ranks": ranks}.get(victim, ranks[:1])
        for pid in chosen or [process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if end(process)[0] == 0:  # it reached its end before
            return
        self.see_that_nothing_is_left()

    def see_that_nothing_is_left(self) -> None:
        self.deaths += 1
        until(lambda: not processes_of(self.runs), "no process", CLEARED)

    def go_on_to_the_end(self) -> None:
        finish(self.start())
        assert not processes_of(self.runs)

    def rows(self) -> int:
        file = self.folder / "metrics.jsonl"
        return file.stat().st_size if file.exists() else 0


def children(process: Job) -> list[int]:
    try:
        return [
            *map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []


def test_the_launcher_resumes_a_job_whose_rank_was_killed(finished, corpus, tmp_path):
    process = start(corpus, tmp_path, "--max-restarts", "1")
    until(lambda: all_steps(tmp_path / "tiny" / "checkpoints"), "a checkpoint", LIMIT)
    os.kill(children(process)[1], signal.SIGKILL)
    errors = finish(process)
    assert f"rank 1 was ended by SIGKILL{KILLED}\nstarting the ranks again" in errors
    assert losses(tmp_path / "tiny") == losses(finished[0])
    assert len([*(tmp_path / "tiny" / "attempts").glob("*.json")]) == 2
    assert not processes_of(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["own", "torchrun"])
def test_disturbed_again_and_again_it_is_the_same_run(launcher, finished, corpus, tmp_path):
    """Stopped, killed inside a save, killed with its launcher, and finished by one of two."""
    stopped = start_sabotaged("SIGTERM@1", corpus, tmp_path)
    printed, errors = stopped.communicate(timeout=LIMIT)
    assert stopped.returncode == STOPPED, errors
    assert all_steps(tmp_path / "tiny" / "checkpoints")[-1] == STEP + 1  # within that step
    assert "start it again to resume" in printed
    killer = Killer(corpus, tmp_path, seed=0)
    killer.kill_inside_a_save("manifest", saves=1)
    killer.kill_from_outside()
    assert killer.deaths == 2
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "tandem"]
    by_torchrun = launcher == "torchrun"
    last = start_program([*torchrun, *killer.job], tmp_path) if by_torchrun else killer.start()
    printed, errors = last.communicate(timeout=LIMIT)
    assert last.returncode == 0, errors
    assert "resuming from step" in printed
    assert len(list((tmp_path / "tiny" / "logs").glob("rank-*.log"))) == 2
    assert losses(tmp_path / "tiny") == losses(finished[0])


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    runs = tmp_path_factory.mktemp("undisturbed")
    finish(start(corpus, runs, *MANY))
    return losses(runs / "tiny")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_more_than_fifty_kills(undisturbed, corpus, tmp_path, seed):
    killer = Killer(corpus, tmp_path, seed, MANY)
    phases = [*PHASES, *PHASES, *PHASES, *PHASES][6 * seed :]
    for phase in phases[:6]:
        killer.kill_inside_a_save(phase, saves=4)
        killer.kill_from_outside()
    killer.go_on_to_the_end()
    assert losses(killer.folder) == undisturbed
    assert killer.deaths >= 10
