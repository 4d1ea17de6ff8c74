"""Saving without DeepSpeed, for tests of what happens on the disk."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn

from trainer.checkpoint.attempts import Attempt
from trainer.checkpoint.folder import Retention
from trainer.checkpoint.publication import Save, Store, publish
from trainer.checkpoint.reader import Checkpoint, newest_intact
from trainer.checkpoint.snapshot import HostBuffer, prepare_snapshot

T = TypeVar("T")
LEARNERS = ("teacher", "students/small")


class Alone:
    """The ranks of a job with one process, without a process group."""

    rank, size = 0, 1

    def agree(self, action: Callable[[], T]) -> T:
        return action()

    def collect(self, value: T) -> list[T]:
        return [value]


def plain_engine(value: float, size: int = 5) -> Any:
    """What a checkpoint reads of a stage-0 fp32 engine; all weights are ``value``."""
    module = nn.Linear(size, size)
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return SimpleNamespace(
        module=module,
        optimizer=torch.optim.AdamW(module.parameters()),
        torch_autocast_z0_gradscaler=None,
        global_steps=0,
        global_samples=0,
        skipped_steps=0,
    )


def content(step: int, size: int = 5) -> Save:
    """A checkpoint in which every weight equals its step."""
    learners = {
        name: prepare_snapshot(plain_engine(float(step), size), 0, 1).copy(HostBuffer())
        for name in LEARNERS
    }
    return Save(step, learners, {"step": step, "metric": None, "state": {"step": step}})


def save(
    run: Path,
    step: int,
    attempt: Attempt | None,
    keep: int = 2,
    size: int = 5,
    resumed_from: int | None = None,
) -> None:
    """Publish a checkpoint of ``run`` from this process alone."""
    pinned = frozenset() if resumed_from is None else frozenset([resumed_from])
    store = Store(run / "checkpoints", Retention(last=keep), attempt, pinned)
    store.folder.mkdir(exist_ok=True)
    publish(content(step, size), store, Alone())  # type: ignore[arg-type]


def is_whole(checkpoint: Checkpoint) -> bool:
    """Whether every number in a checkpoint made by :func:`save` is intact."""
    return checkpoint.trainer_state == {"step": checkpoint.step} and all(
        (tensor == checkpoint.step).all()
        for name in LEARNERS
        for tensor in checkpoint.master_weights(name).values()
    )


def newest(run: Path) -> Checkpoint:
    """The newest undamaged checkpoint of a run."""

    def unexpected(line: str) -> None:
        raise AssertionError(line)

    checkpoint = newest_intact(run / "checkpoints", unexpected)
    assert checkpoint is not None
    assert is_whole(checkpoint)
    return checkpoint


def kill_at(event: int, part: str, acts: tuple[str, ...] = ("open", "os.", "shutil.")) -> None:
    """Kill this process before it opens, makes, renames or removes its n-th path of `part`.

    `part` is a regular expression for paths; `acts` are prefixes of names of Python's audit events.
    """
    seen = 0

    def watch(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if name.startswith(acts) and re.search(part, str(arguments[:2])):
            seen += 1
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
