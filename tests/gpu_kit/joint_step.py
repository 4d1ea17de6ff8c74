"""Joint steps of a tiny teacher and its students, as one rank of a job on GPUs runs them."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tests.gpu_kit.counting import Collective, collectives, host_syncs
from tests.gpu_kit.device import pretend_gpu
from tests.trainer import tiny
from trainer.batch_config import StepShape
from trainer.learner_config import LearnerConfig
from trainer.learner_names import TEACHER, student_key
from trainer.learners.learner import Learner
from trainer.optimizers.config import optimizer_config
from trainer.step import train_step

MICRO_BATCH, ACCUMULATION = 2, 2
# At most this many host syncs in a step of a teacher and three students, by ZeRO stage. At stage 3
# DeepSpeed waits while reductions lag, here always: once in each of eight backward passes.
SYNCS = {0: 1, 1: 1, 2: 1, 3: 1 + 8}


class Counted(NamedTuple):
    """The cost of one step of a teacher and all its students."""

    syncs: Counter[str]  # of the host, by kind and line
    sent: list[Collective]
    sent_without_one: list[Collective]  # in a step without the last student
    seconds: float  # of this process's CPU time


def learner_configs(
    stage: int,
    students: int,
    optimizer: str = "adamw",
    communication: str = "fp32",
    precision: str = "bf16",
) -> dict[str, LearnerConfig]:
    """A teacher and this many students."""
    teacher, *others = tiny.learner_configs((stage,) * 3).values()
    named = {student_key(f"s{number}"): others[number % 2] for number in range(students)}
    return {
        name: dataclasses.replace(
            config,
            precision=precision,
            communication=communication,
            optimizer=optimizer_config(optimizer, learning_rate=1e-4),
        )
        for name, config in {TEACHER: teacher, **named}.items()
    }


def count_step(
    stage: int,
    students: int,
    optimizer: str = "adamw",
    communication: str = "fp32",
    precision: str = "bf16",
) -> Counted:
    """Count one step on a simulated GPU, after the first ones, which differ in DeepSpeed."""
    pretend_gpu()
    configs = learner_configs(stage, students, optimizer, communication, precision)
    shape = StepShape(tiny.STEPS, tiny.SEED, MICRO_BATCH, ACCUMULATION)
    teacher, *others = [
        Learner(name, config, configs[TEACHER].model, shape) for name, config in configs.items()
    ]
    batch = tiny.random_batch(1, MICRO_BATCH * ACCUMULATION)
    for step in range(3):
        train_step(teacher, others, batch, step)
    keep_step_counts_on_host([teacher, *others])
    with host_syncs() as syncs, collectives() as sent:
        train_step(teacher, others, batch, 3)
    with collectives() as sent_without_one:
        train_step(teacher, others[:-1], batch, 4)
    began = time.process_time()
    train_step(teacher, others, batch, 5)
    return Counted(syncs, sent, sent_without_one, time.process_time() - began)


def keep_step_counts_on_host(learners: Sequence[Learner]) -> None:
    """Mark the optimizers' counts of steps, which torch keeps in host memory on a GPU too."""
    for learner in learners:
        for state in learner.engine.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"].__dict__["_is_on_host"] = True
