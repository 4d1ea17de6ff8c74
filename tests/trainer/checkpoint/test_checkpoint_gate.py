"""While a checkpoint is copied, training computes gradients but changes nothing that is saved."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from unittest import mock

from tests.distributed import run_distributed
from tests.trainer import tiny
from trainer.batch_config import StepShape
from trainer.checkpoint.folder import Retention
from trainer.checkpoint.layout import torch_optimizer
from trainer.checkpoint.snapshot import HostBuffer, PendingSnapshot, Snapshot
from trainer.checkpoint.writer import CheckpointWriter
from trainer.learner_names import TEACHER
from trainer.learners.learner import Learner
from trainer.optimizers.gated import GatedOptimizer
from trainer.step import train_step

STAGES = (3, 0, 1, 2)  # stage 3's first engine replaces torch's linear in the whole process


def step_during_a_copy(folder: Path, stage: int) -> tuple[bool, bool, bool]:
    """Save, and save again while the next step resets the moments and changes the weights.

    Returns whether the step came up to its optimizer, and whether it ended, before the copy; and
    whether the moments that it has forgotten are freed.
    """
    config = tiny.learner_configs((stage, 0, 0))[TEACHER]
    learner = Learner(TEACHER, config, config.model, StepShape(tiny.STEPS, tiny.SEED, 8, 1))
    optimizer, engine_step = torch_optimizer(learner.engine), learner.engine.step
    assert isinstance(optimizer, GatedOptimizer)
    train_step(learner, [], tiny.random_batch(0), 0)
    writer = CheckpointWriter(folder, Retention())
    writer.save(1, {TEACHER: learner.engine}, {}, wait=True)
    moments = [weakref.ref(state["exp_avg"]) for state in optimizer.state.values()]
    begun, ended = threading.Event(), threading.Event()
    seen: list[bool] = []
    copy = PendingSnapshot.copy

    def step() -> None:
        begun.set()
        engine_step()
        ended.set()

    def slow_copy(pending: PendingSnapshot, buffer: HostBuffer) -> Snapshot:
        seen.extend((begun.wait(60), ended.wait(0.5)))
        return copy(pending, buffer)

    with (
        mock.patch.object(PendingSnapshot, "copy", slow_copy),
        mock.patch.object(learner.engine, "step", step),
    ):
        writer.save(2, {TEACHER: learner.engine}, {})
        optimizer.forget()
        train_step(learner, [], tiny.random_batch(1), 1)
    writer.save(3, {TEACHER: learner.engine}, {}, wait=True)
    came, done = seen
    gc.collect()
    return came, done, not any(moment() is not None for moment in moments)


def at_every_stage(folder: Path) -> dict[int, tuple[bool, bool, bool]]:
    return {stage: step_during_a_copy(folder / str(stage), stage) for stage in STAGES}


def test_an_optimizer_waits_until_its_checkpoint_is_copied(tmp_path: Path) -> None:
    """Forward and backward do not wait; weights and moments are saved as they were before."""
    (seen,) = run_distributed(at_every_stage, 1, tmp_path)
    assert seen == dict.fromkeys(STAGES, (True, False, True))
    for stage in STAGES:
        first, during, after = (
            (tmp_path / str(stage) / f"step-{step:09d}/teacher/rank-00000.safetensors").read_bytes()
            for step in (1, 2, 3)
        )
        assert first == during
        assert first != after
