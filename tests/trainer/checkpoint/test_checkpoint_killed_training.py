"""Training that is killed at random instants of its saves ends with the undisturbed losses."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import RankFailed, run_distributed
from tests.trainer.checkpoint.learners import Kind, start, train
from tests.trainer.checkpoint.saving import kill_at
from trainer.checkpoint.attempts import Attempt
from trainer.checkpoint.folder import Retention
from trainer.checkpoint.reader import newest_intact
from trainer.checkpoint.writer import CheckpointWriter

KINDS = {"teacher": Kind(3), "students/one": Kind(0), "students/two": Kind(2, "autocast")}
STEPS, EVERY = 8, 2


def job(run: Path, rank: int | None, event: int) -> dict[str, list[float]]:
    """Train all learners from the run's state to the end; ``rank`` dies at its n-th operation."""
    begun = [Attempt.begin(run) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(begun)
    checkpoints = run / "checkpoints"
    checkpoint = newest_intact(checkpoints, print, dist.group.WORLD)
    step = checkpoint.step if checkpoint else 0
    engines = {name: start(kind, seed=1 if checkpoint else 0) for name, kind in KINDS.items()}
    losses: dict[str, list[float]] = {name: [] for name in KINDS}
    if checkpoint:
        losses = checkpoint.trainer_state["losses"]
        for name, engine in engines.items():
            checkpoint.load(name, engine)
    writer = CheckpointWriter(checkpoints, Retention(last=2), begun[0], resumed_from=step or None)
    if dist.get_rank() == rank:
        kill_at(event, str(checkpoints))
    for at in range(step, STEPS):
        for name, engine in engines.items():
            losses[name] += train(engine, at, at + 1)
        if (at + 1) % EVERY == 0:
            writer.save(at + 1, engines, {"losses": losses})
    assert writer.wait()
    return losses


def run_to_the_end(run: Path, chance: random.Random, kills: int) -> tuple[Any, int]:
    """Restart the job until it ends, killing a rank in the first ``kills`` attempts."""
    died = 0
    while True:
        rank = chance.randrange(2) if died < kills else None
        event = chance.randrange(1, 10 if rank == 1 else 80)  # rank 1 only writes its own files
        try:
            return run_distributed(job, 2, run, rank, event)[0], died
        except RankFailed as failure:
            if "ended by SIGKILL" not in str(failure):
                raise
            died += 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_losses_are_those_of_an_undisturbed_run(tmp_path: Path, seed: int) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    undisturbed.mkdir()
    disturbed.mkdir()
    expected, _ = run_to_the_end(undisturbed, random.Random(seed), kills=0)
    losses, died = run_to_the_end(disturbed, random.Random(seed), kills=4)
    assert losses == expected
    assert died > 0
    assert json.loads((disturbed / "attempts" / "000001.json").read_text())["checkpoints"] == []
