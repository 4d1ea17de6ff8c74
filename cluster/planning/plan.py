"""The complete plan of a job on a machine, beside the usual recipe.

In the usual recipe a teacher is pre-trained alone, and then every student has a job of its own, in
which it pays for the forward passes of the finished teacher. All students in one such job share
them. Every learner trains for as many steps as in the joint job, on batches of the same size, at
its own ZeRO stage.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from cluster.errors import LaunchError
from cluster.planning.failures import HOUR, Reliability, Starts, expect, starts_within
from cluster.planning.machine import Machine, StepTime, step_time
from cluster.planning.memory import (
    STAGES,
    Choice,
    JobMemory,
    LearnerMemory,
    Option,
    choose,
    host_memory,
    job_memory,
    learner_memory,
    options,
    stored_bytes,
)
from configs.errors import OptionError
from configs.plan_facts import JobFacts, LearnerFacts
from configs.strict_json import strict_json

JOINT, SEPARATE, SHARED = "joint", "separate", "shared"
LARGEST_JOB = 4096  # GPUs in the largest row of the scaling table


@dataclass(frozen=True)
class RecipeCost:
    """The costs of a recipe in all its jobs together, without failures.

    Attributes:
        recipe: ``joint`` (this job), ``separate`` (the teacher, then a job for each student) or
            ``shared`` (the teacher, then one job for all students).
        flops: of matrix products.
        cost: None without a price.
        ratio: GPU-hours of the joint job, divided by those of this recipe.
        teacher_steps: how long the joint job's teacher could train for this recipe's GPU-hours,
            where its students train as long as now; None where the teacher is frozen.
    """

    recipe: str
    flops: float
    gpu_hours: float
    cost: float | None
    ratio: float
    teacher_steps: int | None


def compare(job: JobFacts, apart: Sequence[LearnerFacts], machine: Machine) -> list[RecipeCost]:
    """The joint job, and the two recipes beside it; nothing where no student trains.

    `apart` are the job's learners in the order of `job.learners`, as they are in the separate jobs:
    the teachers frozen, and each student with what it no longer shares with the others.
    """
    if not any(learner.active for learner in job.learners[1:] if not learner.teaches):
        return []
    recipes = {JOINT: [job], SEPARATE: [*_separate(job, apart)], SHARED: [*_shared(job, apart)]}
    costs = {name: _cost(jobs, machine) for name, jobs in recipes.items()}
    _, joint = costs[JOINT]
    teacher = job.learners[0]
    a_step = step_time(job, machine).learners[teacher.name].total
    own_steps = round(teacher.training * job.steps)
    return [
        RecipeCost(
            recipe=name,
            flops=flops,
            gpu_hours=seconds / HOUR * machine.ranks,
            cost=None if machine.price is None else machine.price * seconds / HOUR * machine.ranks,
            ratio=joint / seconds,
            teacher_steps=own_steps + int((seconds - joint) / a_step) if teacher.trained else None,
        )
        for name, (flops, seconds) in costs.items()
    ]


def _separate(job: JobFacts, apart: Sequence[LearnerFacts]) -> Iterator[JobFacts]:
    yield from _pretraining(job, apart[0])
    teachers = _teachers(apart)
    for student in apart[len(teachers) :]:
        learners = (*teachers, replace(student, active=1.0))
        yield replace(job, steps=round(student.active * job.steps), learners=learners)


def _shared(job: JobFacts, apart: Sequence[LearnerFacts]) -> Iterator[JobFacts]:
    """The students start together, and the job ends with the one that trains longest."""
    yield from _pretraining(job, apart[0])
    teachers = _teachers(apart)
    students = job.learners[len(teachers) :]
    longest = max(student.active for student in students)
    learners = [replace(student, active=student.active / longest) for student in students]
    yield replace(job, steps=round(longest * job.steps), learners=(*teachers, *learners))


def _teachers(learners: Sequence[LearnerFacts]) -> list[LearnerFacts]:
    """The first of them, and the further ones that teach."""
    return [learners[0], *(learner for learner in learners[1:] if learner.teaches)]


def _pretraining(job: JobFacts, finished: LearnerFacts) -> Iterator[JobFacts]:
    """The steps in which the teacher trains; `finished` is what it takes when it only teaches."""
    teacher = job.learners[0]
    if teacher.trained:
        teaches = 1 - teacher.training
        trains = replace(
            teacher,
            forward_flops=(teacher.forward_flops - teaches * finished.forward_flops)
            / teacher.training,
            backward_flops=teacher.backward_flops / teacher.training,
        )
        yield replace(job, steps=round(teacher.training * job.steps), learners=(trains,))


def _cost(jobs: Sequence[JobFacts], machine: Machine) -> tuple[float, float]:
    """FLOPs and seconds of `jobs`, one after another."""
    times = [(job.steps, step_time(job, machine)) for job in jobs]
    return (
        sum(steps * time.flops for steps, time in times),
        sum(steps * time.seconds for steps, time in times),
    )


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
    """Plan `job` on `machine`; `apart` are its learners in jobs of their own (see `compare`).

    Raises LaunchError where its batch does not divide over ranks, OptionError where a start has no
    time to train.
    """
    if uneven := undivided([job.rows], machine):
        raise LaunchError(uneven)
    memory, time = job_memory(job, machine), step_time(job, machine)
    work = time.seconds * job.steps
    gpu_hours = work / HOUR * machine.ranks
    reliability = _reliability(job, machine, time.seconds, job.checkpoint_every)
    best = _steps(reliability.best_interval, time.seconds, job)
    return Plan(
        job=job,
        machine=machine,
        by_stage={
            learner.name: _by_stage(job, machine, number)
            for number, learner in enumerate(job.learners)
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


def undivided(batches: Iterable[int], machine: Machine) -> str:
    """The batches, in rows, that do not divide over the ranks, and the way out; empty: none."""
    uneven = [str(rows) for rows in sorted({*batches}) if rows % machine.ranks]
    if not uneven:
        return ""
    return (
        f"batch: {', '.join(uneven)} sequences do not divide over {machine.ranks} "
        f"{machine.device.unit}s; choose a multiple of {machine.ranks}, or change --nodes and "
        "--gpus-per-node"
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
        raise OptionError(
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
