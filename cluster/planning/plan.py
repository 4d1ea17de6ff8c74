"""The complete plan of a job on a machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.errors import LaunchError
from cluster.planning.choice import Choice, Option, choose, options
from cluster.planning.duration import StepTime, step_time
from cluster.planning.failures import HOUR, Reliability, Starts, expect, starts_within
from cluster.planning.machine import Machine
from cluster.planning.memory import (
    STAGES,
    JobMemory,
    LearnerMemory,
    host_memory,
    job_memory,
    learner_memory,
    stored_bytes,
)
from cluster.planning.recipes import RecipeCost, compare
from configs.plan_facts import JobFacts, LearnerFacts
from configs.strict_json import strict_json

LARGEST_JOB = 4096  # GPUs in the largest row of the scaling table


@dataclass(frozen=True)
class Scaling:
    """The job on another number of nodes."""

    nodes: int
    gpus: int
    seconds_per_step: float
    days: float
    gpu_hours: float
    waiting: float  # fraction of a step that is exposed communication
    effective: float  # as in `Reliability`


@dataclass(frozen=True)
class Plan:
    """The result of `tandem plan`, in bytes and seconds."""

    job: JobFacts
    machine: Machine
    by_stage: dict[str, list[LearnerMemory]]  # learner -> its memory at ZeRO stages 0 to 3
    memory: JobMemory  # at the stages and the micro-batch of the config
    fits: bool
    host_bytes: float  # of each node
    time: StepTime
    days: float  # without failures
    gpu_hours: float
    cost: float | None
    reliability: Reliability  # at the config's checkpoint interval
    starts: Starts | None  # None without a time limit
    best_checkpoint_every: int  # steps
    reliability_at_best: Reliability
    options: list[Option]
    recommended: Choice | None
    scaling: list[Scaling]
    recipes: list[RecipeCost]  # this job and the usual recipe; empty without students
    storing_gpu_hours: float | None  # of the teacher's pass whose predictions the job reads

    def to_json(self) -> str:
        """The plan as JSON; infinite values are null."""
        return strict_json(dataclasses.asdict(self))


def make_plan(job: JobFacts, machine: Machine, apart: Sequence[LearnerFacts] = ()) -> Plan:
    """Plan `job` on `machine`; `apart` are its learners in jobs of their own (`recipes.compare`).

    Raises LaunchError where the batch does not divide over ranks, or a start has no time to train.
    """
    if job.rows % machine.ranks:
        unit = machine.device.unit
        raise LaunchError(
            f"batch.size: {job.rows} sequences do not divide over {machine.ranks} {unit}s; "
            f"choose a multiple of {machine.ranks}, or change --nodes and --gpus-per-node"
        )
    memory, time = job_memory(job, machine), step_time(job, machine)
    work = time.seconds * job.steps
    gpu_hours = work / HOUR * machine.ranks
    reliability = _reliability(job, machine, time.seconds, job.checkpoint_every)
    best = _steps(reliability.best_interval, time.seconds, job)
    return Plan(
        job=job,
        machine=machine,
        by_stage={
            one.name: _by_stage(job, machine, number) for number, one in enumerate(job.learners)
        },
        memory=memory,
        fits=memory.needed <= machine.device.memory_gb * 1e9,
        time=time,
        days=work / HOUR / 24,
        gpu_hours=gpu_hours,
        cost=None if machine.price is None else machine.price * gpu_hours,
        host_bytes=host_memory(job, machine),
        reliability=reliability,
        starts=_starts(work, reliability, machine),
        best_checkpoint_every=best,
        reliability_at_best=_reliability(job, machine, time.seconds, best),
        options=options(job, machine),
        recommended=choose(job, machine),
        scaling=_scaling(job, machine),
        recipes=compare(job, apart, machine) if apart else [],
        storing_gpu_hours=_storing(job, apart[0], machine) if job.stored else None,
    )


def _storing(job: JobFacts, teacher: LearnerFacts, machine: Machine) -> float:
    """GPU-hours of the forward passes of the `teacher`, as it is where it runs."""
    one_step = step_time(replace(job, learners=(teacher,)), machine).seconds
    return one_step * job.steps / HOUR * machine.ranks


def _starts(work: float, reliability: Reliability, machine: Machine) -> Starts | None:
    """The starts of the run with its failures; a run that failures never let end is left out."""
    if machine.time_limit is None or not reliability.effective:
        return None
    saving = reliability.stall + reliability.write
    limits = machine.time_limit, machine.warning_seconds, machine.restart_seconds
    starts = starts_within(*limits, saving, work / reliability.effective)
    if starts is None:
        raise LaunchError(
            f"--time: {machine.time_limit} s leave no time to train, with "
            f"{machine.restart_seconds:g} s until the first step and {machine.warning_seconds} s "
            "to save; ask for more"
        )
    return starts


def _by_stage(job: JobFacts, machine: Machine, number: int) -> list[LearnerMemory]:
    rows = job.rows // machine.ranks
    size = min(job.micro_batch, rows)
    return [
        learner_memory(
            replace(job.learners[number], zero_stage=stage),
            machine.ranks,
            size,
            rows > size,
            machine.overlaps,
        )
        for stage in STAGES
    ]


def _reliability(job: JobFacts, machine: Machine, seconds: float, every: int) -> Reliability:
    stored = sum(map(stored_bytes, job.learners))
    return expect(
        work=seconds * job.steps,
        interval=seconds * min(every, job.steps),
        stall=stored / machine.ranks / (machine.copy_gbs * 1e9),
        write=stored / (machine.store_gbs * 1e9),
        mtbf=machine.node_mtbf_hours * HOUR / machine.nodes,
        restart=machine.restart_seconds,
    )


def _steps(interval: float, seconds: float, job: JobFacts) -> int:
    return max(1, min(job.steps, round(interval / seconds)))


def _scaling(job: JobFacts, machine: Machine) -> list[Scaling]:
    """The job on 1, 2, 4, ... nodes, wherever the batch divides over the GPUs."""
    rows, nodes = [], 1
    while nodes * machine.gpus_per_node <= LARGEST_JOB:
        other = replace(machine, nodes=nodes)
        if job.rows % other.ranks == 0:
            time = step_time(job, other)
            interval = _reliability(job, other, time.seconds, job.checkpoint_every).best_interval
            every = _steps(interval, time.seconds, job)
            effective = _reliability(job, other, time.seconds, every).effective
            days = time.seconds * job.steps / HOUR / 24 / effective if effective else math.inf
            rows.append(
                Scaling(
                    nodes=nodes,
                    gpus=other.ranks,
                    seconds_per_step=time.seconds,
                    days=days,
                    gpu_hours=days * 24 * other.ranks,
                    waiting=time.exposed / time.seconds,
                    effective=effective,
                )
            )
        nodes *= 2
    return rows
