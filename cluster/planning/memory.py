"""Bytes that one rank holds, by ZeRO stage, and the choice of stages and a micro-batch that fit.

Parameters, master copies and moments are float32, whatever precision autocast computes in; with
bf16 weights the parameters alone take half, and stage 0 has a master copy too.
Stages 1 and 2 keep whole parameters and partition a float32 master copy. Stage 3 partitions
parameters and gradients too. During a pass it also holds the parameters whole, in two
copies while they are fetched, since its reuse distance is longer than these models.
``tests/cluster`` and ``tests/trainer/test_footprint.py`` compare this with engines on two ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.planning.machine import FLOAT, Machine, StepTime, step_time
from configs.plan_facts import JobFacts, LearnerFacts

STAGES = (0, 1, 2, 3)
STAGE_0_BUCKET = 500_000_000  # elements that DeepSpeed flattens at once at stage 0
LARGEST_GATHERED = 1_000_000_000  # elements: stage3_max_live_parameters
# Tokens per micro-batch that keep a device busy with matrix products; more gains little.
ENOUGH_TOKENS = 8192


@dataclass(frozen=True)
class LearnerMemory:
    """Bytes of one learner on one rank.

    Attributes:
        parameters, optimizer: held from step to step.
        gradients: held from a backward pass to the update.
        buckets: buffers that reduce gradients or gather parameters while the learner trains.
        activations: of one micro-batch.
        waiting: held besides `states` while other learners train.
        at_work: the peak besides `states`, in the backward pass, the reduction or the update.
    """

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    buckets: float
    activations: float
    waiting: float
    at_work: float

    @property
    def states(self) -> float:
        """Bytes held from step to step."""
        return self.parameters + self.optimizer


@dataclass(frozen=True)
class JobMemory:
    """Bytes of all learners on one rank, and their peak."""

    learners: dict[str, LearnerMemory]
    captured: float
    peak: float  # of tensors
    needed: float  # the peak with allocator and library overhead


def stored_bytes(learner: LearnerFacts) -> float:
    """Bytes in a checkpoint: the weights that are trained, and the optimizer's states."""
    return FLOAT * learner.trained * (1 + learner.states)


def learner_memory(
    learner: LearnerFacts, ranks: int, micro_batch: int, accumulates: bool, overlaps: bool
) -> LearnerMemory:
    """The memory of `learner` at its stage; `accumulates`: a step has several micro-batches."""
    stage, share = learner.zero_stage, 1 / ranks
    parameters, trained = learner.weight_bytes * learner.parameters, FLOAT * learner.trained
    filled = learner.weight_bytes if stage == 2 else FLOAT  # others add up before they send
    bucket = filled * min(learner.bucket, learner.trained) if stage else 0.0
    optimizer: float = FLOAT * learner.states * learner.trained
    if stage or learner.weight_bytes < FLOAT:
        optimizer = (optimizer + trained) * (share if stage else 1)
    if learner.offloaded:
        optimizer = 0.0
    fixed, per_row = learner.activations
    activations = fixed + per_row * micro_batch
    if stage in (1, 2) and not learner.has_buckets:
        return _with_flat_gradients(learner, ranks, optimizer, activations, accumulates)
    rounded = learner.exchanged / filled if learner.exchanged != filled else 0.0  # a copy to send
    # Wider copies are made after the backward pass, unless reductions overlap it.
    beside = rounded if overlaps or learner.exchanged < filled else 0.0
    buckets = bucket * ((2 if overlaps else 1) + beside)
    if stage == 3:  # a bucket and a gradient partition are held from the engine's start
        optimizer += bucket + trained * share
        buckets = 2 * learner.weight_bytes * min(learner.parameters, LARGEST_GATHERED)
    gradients = {0: trained, 1: trained, 2: trained * share, 3: 0.0}[stage]
    waiting = gradients
    if stage == 1 and accumulates:  # its buckets are not freed between micro-batches
        waiting += buckets
    # In the first micro-batch, gradients grow no faster than activations are freed.
    in_backward = activations + (max(waiting, gradients + buckets) if accumulates else buckets)
    update = _update(learner, bucket, share, accumulates, rounded)
    return LearnerMemory(
        stage=stage,
        parameters=parameters * (share if stage == 3 else 1),
        gradients=gradients,
        optimizer=optimizer,
        buckets=buckets,
        activations=activations,
        waiting=waiting,
        at_work=max(in_backward, update),
    )


def _with_flat_gradients(
    learner: LearnerFacts, ranks: int, optimizer: float, activations: float, accumulates: bool
) -> LearnerMemory:
    """The memory at stages 1 and 2, where a backward pass's gradients become one tensor a group."""
    trained, taken = FLOAT * learner.trained, learner.weight_bytes * learner.trained
    part = trained / ranks
    sums = (trained if learner.zero_stage == 1 else part) if accumulates else 0.0
    flat = trained if learner.zero_stage == 1 else taken
    sent = learner.exchanged * learner.trained + part if ranks > 1 else 0.0
    # Gradients beside their flat copy; that beside what is sent, and the part that remains.
    reduced = max(sums + 2 * taken, flat + sent + (sums if learner.zero_stage == 2 else 0.0))
    return LearnerMemory(
        stage=learner.zero_stage,
        parameters=learner.weight_bytes * learner.parameters,
        gradients=sums or part,
        optimizer=optimizer,
        buckets=reduced - (sums or part),
        activations=activations,
        waiting=sums or part,
        # Gradients grow no faster than activations are freed. The step has two temporaries.
        at_work=max(activations + sums, reduced, 3 * part),
    )


def _update(
    learner: LearnerFacts, bucket: float, share: float, accumulates: bool, rounded: float
) -> float:
    """The peak while gradients are reduced and the optimizer steps, gradients included."""
    stage, trained = learner.zero_stage, FLOAT * learner.trained
    if stage == 0:  # the gradients, and a flat copy of them, or the optimizer's temporaries
        return trained + min(trained, FLOAT * STAGE_0_BUCKET) * (1 + rounded)
    step = 4 * trained * share  # the partition, its flat copy, and two temporaries of the optimizer
    if stage == 1:
        return max(trained + bucket * ((2 if accumulates else 1) + rounded), step)
    if stage == 2:
        copies = 2 if learner.weight_bytes == FLOAT else 1  # what is rounded is added up at once
        return max((copies + rounded) * bucket + (trained * share if accumulates else 0.0), step)
    return step


def job_memory(job: JobFacts, machine: Machine, micro_batch: int | None = None) -> JobMemory:
    """The memory of the whole job, with each learner at its stage; learners train in turn."""
    size = micro_batch or job.micro_batch
    rows = job.rows // machine.ranks
    accumulates = rows > size
    size = min(size, max(1, rows))
    learners = sorted(job.learners, key=lambda learner: not learner.generates)
    memories = [
        learner_memory(learner, machine.ranks, size, accumulates, machine.overlaps)
        for learner in learners
    ]
    left = [learner.captured[0] + learner.captured[1] * size for learner in learners]
    for number, learner in enumerate(learners):
        if learner.zero_stage == 3:
            left[number] += learner.weight_bytes * learner.projection
    moments = []
    for number, memory in enumerate(memories):
        others = [*memories[:number], *(memories[number + 1 :] if accumulates else ())]
        waiting = sum(other.waiting for other in others)
        moments.append(waiting + memory.at_work + sum(left[:number]))
    peak = sum(memory.states for memory in memories) + max(moments)
    needed = peak * (1 + machine.fragmented) + machine.reserved_gb * 1e9
    named = {learner.name: memory for learner, memory in zip(learners, memories, strict=True)}
    return JobMemory(named, sum(left[:-1]), peak, needed)


def host_memory(job: JobFacts, machine: Machine) -> float:
    """Bytes on the host of a node, for ``--mem``: its ranks, and their parts of what is held there.

    That is the copy from which a checkpoint is written, and of learners that are offloaded the
    master weights, moments and gradients. Each rank has the weights of a teacher whose predictions
    are stored.
    """
    waiting = FLOAT * job.learners[0].parameters if job.stored else 0
    held = sum(
        stored_bytes(learner)
        + learner.offloaded * (stored_bytes(learner) + FLOAT * learner.trained)
        for learner in job.learners
    )
    return machine.gpus_per_node * (machine.host_gb * 1e9 + waiting + held / machine.ranks)


def at_stages(job: JobFacts, teacher: int, students: int) -> JobFacts:
    """The job with these ZeRO stages; frozen learners keep theirs, except the teacher."""
    stages = [teacher, *[students] * (len(job.learners) - 1)]
    learners = tuple(
        replace(learner, zero_stage=stage) if learner.trained or not number else learner
        for number, (learner, stage) in enumerate(zip(job.learners, stages, strict=True))
    )
    return replace(job, learners=learners)


def largest_micro_batch(job: JobFacts, machine: Machine, sizes: Sequence[int]) -> int | None:
    """The largest of `sizes` that fits into a GPU's memory; None if none does."""
    room = machine.device.memory_gb * 1e9
    fitting = [size for size in sizes if job_memory(job, machine, size).needed <= room]
    return max(fitting, default=None)


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
    rows = job.rows // machine.ranks
    sizes = [size for size in range(1, rows + 1) if rows % size == 0]
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
    fitting = [option for option in options(job, machine) if option.micro_batch]
    if not fitting:
        return None
    best = next(
        (option for option in fitting if (option.micro_batch or 0) >= enough),
        max(fitting, key=lambda option: option.micro_batch or 0),
    )
    chosen = at_stages(job, best.teacher_stage, best.student_stage)
    chosen = replace(chosen, micro_batch=best.micro_batch or 1)
    return Choice(best, job_memory(chosen, machine), step_time(chosen, machine))
