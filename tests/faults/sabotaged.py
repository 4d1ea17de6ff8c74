"""Ranks of the real job in which something goes wrong, in step 3."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from trainer import run
from trainer import run as conclusion
from trainer.errors import TrainingError

STEP = 3


def flip_a_bit(learner: Any) -> None:
    """Flip the lowest bit of one weight, which changes no loss noticeably."""
    weights = next(iter(learner.engine.module.parameters())).data.view(-1)
    weights[:1].view(torch.int32).bitwise_xor_(1)


def fail(error: Exception) -> None:
    raise error


def jump(days: float) -> None:
    now = time.time
    time.time = lambda: now() + days * 86400.0


def send(number: signal.Signals, learner: Any) -> None:
    os.kill(os.getpid(), number)


def sleep(*_: Any) -> None:
    time.sleep(1000)


def sleep_in_an_export(learner: Any) -> None:
    conclusion.export_learner = sleep


SABOTAGE: dict[str, Callable[[Any], None]] = {
    "flips": flip_a_bit,
    "sleeps": sleep,
    "sleeps in an export": sleep_in_an_export,
    "freezes": lambda learner: os.kill(os.getpid(), signal.SIGSTOP),
    "fails": lambda learner: fail(RuntimeError("a bug of rank 1")),
    "jumps": lambda learner: jump(365.0),
    "jumps back": lambda learner: jump(-365.0),
    "complains": lambda learner: fail(TrainingError("rank 1 has no such file")),
    **{name: partial(send, signal.Signals[name]) for name in ("SIGTERM", "SIGINT", "SIGUSR1")},
}


def sabotage(what: str) -> None:
    """Inject the fault, if this is a rank for it; `what` is KIND@RANK, or several with commas."""
    kinds = dict(reversed(each.split("@")) for each in what.split(","))
    kind = kinds.get(os.environ["RANK"])
    if kind is None:
        return
    step = run.train_step

    def sabotaged(teacher: Any, students: Any, batch: Any, number: int, *rest: Any) -> Any:
        if number == STEP:
            SABOTAGE[kind]([teacher, *students][-1])
        return step(teacher, students, batch, number, *rest)

    run.train_step = sabotaged
