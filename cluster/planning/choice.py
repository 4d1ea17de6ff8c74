"""Choosing ZeRO stages and a micro-batch: the lowest stages that leave enough memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cluster.planning.duration import StepTime, step_time
from cluster.planning.machine import Machine
from cluster.planning.memory import JobMemory, at_stages, job_memory, largest_micro_batch
from configs.plan_facts import JobFacts

# Tokens per micro-batch that keep a device busy with matrix products; more gains little.
ENOUGH_TOKENS = 8192


@dataclass(frozen=True)
class Option:
    """ZeRO stages, and the largest micro-batch that fits with them (None: none fits)."""

    teacher_stage: int
    student_stage: int
    micro_batch: int | None


@dataclass(frozen=True)
class Choice:
    """The recommended option, its memory and its time."""

    option: Option
    memory: JobMemory
    time: StepTime


def options(job: JobFacts, machine: Machine) -> list[Option]:
    """Every combination of stages, lowest first.

    Students are never at a higher stage than a teacher that is trained. A frozen one has stage 0 or
    3, and keeps its own where that is decided by what it stores or offloads.
    """
    first = job.learners[0]
    frozen = (first.zero_stage,) if first.offloaded or job.stored else (0, 3)
    sizes = list(micro_batches(job.rows // machine.ranks))
    return [
        Option(
            teacher,
            students,
            largest_micro_batch(at_stages(job, teacher, students), machine, sizes),
        )
        for teacher in (range(4) if first.trained else frozen)
        for students in range(teacher + 1 if first.trained else 4)
    ]


def choose(job: JobFacts, machine: Machine) -> Choice | None:
    """The lowest stages with memory for a large enough micro-batch; None if nothing fits.

    Higher stages only save memory. So the choice is the first option whose micro-batch has
    `ENOUGH_TOKENS`, or holds all of a rank's sequences. Where no option does, it is the one with
    the largest micro-batch.
    """
    enough = min(job.rows // machine.ranks, math.ceil(ENOUGH_TOKENS / job.length))
    fitting = [one for one in options(job, machine) if one.micro_batch]
    if not fitting:
        return None
    best = next(
        (one for one in fitting if (one.micro_batch or 0) >= enough),
        max(fitting, key=lambda one: one.micro_batch or 0),
    )
    chosen = at_stages(job, best.teacher_stage, best.student_stage)
    chosen = replace(chosen, micro_batch=best.micro_batch or 1)
    return Choice(best, job_memory(chosen, machine), step_time(chosen, machine))


def micro_batches(rows: int) -> Iterator[int]:
    """The micro-batch sizes that divide `rows` sequences evenly, ascending."""
    yield from (size for size in range(1, rows + 1) if rows % size == 0)
