"""Which ZeRO stages and which micro-batch to take: the smallest stages that leave enough room."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cluster.planning.duration import StepTime, step_time
from cluster.planning.facts import JobFacts, Machine
from cluster.planning.memory import JobMemory, at_stages, job_memory, largest_micro_batch

# Tokens of a micro-batch with which matrix products keep a device busy; more gains little.
ENOUGH_TOKENS = 8192


@dataclass(frozen=True)
class Option:
    """One choice of stages, and the largest micro-batch that fits with it (None: none does)."""

    teacher_stage: int
    student_stage: int
    micro_batch: int | None


@dataclass(frozen=True)
class Choice:
    """The recommended option, and what it needs and takes."""

    option: Option
    memory: JobMemory
    time: StepTime


def options(job: JobFacts, machine: Machine) -> list[Option]:
    """Every choice of stages from the smallest on; students never at a larger one."""
    sizes = list(micro_batches(job.rows // machine.ranks))
    return [
        Option(
            teacher,
            students,
            largest_micro_batch(at_stages(job, teacher, students), machine, sizes),
        )
        for teacher in range(4)
        for students in range(teacher + 1)
    ]


def choose(job: JobFacts, machine: Machine) -> Choice | None:
    """The smallest stages with room for a micro-batch that is large enough; None if none fits.

    Larger stages buy nothing but memory, so they are taken only where smaller ones leave room for
    less than `ENOUGH_TOKENS` (or the whole share of a rank); where none leaves that much, those
    with the largest micro-batch are.
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
    """The sizes that cut `rows` sequences evenly, ascending."""
    yield from (size for size in range(1, rows + 1) if rows % size == 0)
