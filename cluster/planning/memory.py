"""Bytes that one rank holds, by ZeRO stage: states, gradients, buckets, activations, captures.

Parameters, master copies and moments are float32, whatever precision autocast computes in.
DeepSpeed's stages 1 and 2 keep whole parameters and partition a float32 master copy. Stage 3
partitions parameters and gradients too. During a pass it also holds the parameters whole, in two
copies while they are fetched, since its reuse distance is longer than these models.
``tests/cluster`` and ``tests/trainer/test_footprint.py`` compare this with engines on two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.planning.machine import Machine
from configs.plan_facts import JobFacts, LearnerFacts

STAGES = (0, 1, 2, 3)
FLOAT = 4
STAGE_0_BUCKET = 500_000_000  # elements that DeepSpeed flattens at once at stage 0
LARGEST_GATHERED = 1_000_000_000  # elements: stage3_max_live_parameters


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
    whole, trained = FLOAT * learner.parameters, FLOAT * learner.trained
    bucket = FLOAT * min(learner.bucket, learner.trained) if stage else 0.0
    optimizer: float = FLOAT * learner.states * learner.trained
    if stage:
        optimizer = (optimizer + trained) * share
    if learner.offloaded:
        optimizer = 0.0
    rounded = learner.exchanged / FLOAT if learner.exchanged < FLOAT else 0.0  # a copy to send
    buckets = bucket * ((2 if overlaps else 1) + rounded)
    if stage == 3:  # a bucket and a gradient partition are held from the engine's start
        optimizer += bucket + trained * share
        buckets = 2 * FLOAT * min(learner.parameters, LARGEST_GATHERED)
    gradients = {0: trained, 1: trained, 2: trained * share, 3: 0.0}[stage]
    waiting = gradients
    if stage == 1 and accumulates:  # its buckets are not freed between micro-batches
        waiting += buckets
    fixed, per_row = learner.activations
    activations = fixed + per_row * micro_batch
    # In the first micro-batch, gradients grow no faster than activations are freed.
    in_backward = activations + (max(waiting, gradients + buckets) if accumulates else buckets)
    update = _update(stage, trained, bucket, share, accumulates, rounded)
    return LearnerMemory(
        stage=stage,
        parameters=whole * (share if stage == 3 else 1),
        gradients=gradients,
        optimizer=optimizer,
        buckets=buckets,
        activations=activations,
        waiting=waiting,
        at_work=max(in_backward, update),
    )


def _update(
    stage: int, trained: float, bucket: float, share: float, accumulates: bool, rounded: float
) -> float:
    """The peak while gradients are reduced and the optimizer steps, gradients included."""
    if stage == 0:  # the gradients, and a flat copy of them, or the optimizer's temporaries
        return trained + min(trained, FLOAT * STAGE_0_BUCKET) * (1 + rounded)
    step = 4 * trained * share  # the partition, its flat copy, and two temporaries of the optimizer
    if stage == 1:
        return max(trained + bucket * ((2 if accumulates else 1) + rounded), step)
    if stage == 2:
        return max((2 + rounded) * bucket + (trained * share if accumulates else 0.0), step)
    return step


def job_memory(job: JobFacts, machine: Machine, micro_batch: int | None = None) -> JobMemory:
    """The memory of the whole job, with each learner at its stage; learners train in turn."""
    size = micro_batch or job.micro_batch
    rows = job.rows // machine.ranks
    accumulates = rows > size
    size = min(size, max(1, rows))
    memories = [
        learner_memory(one, machine.ranks, size, accumulates, machine.overlaps)
        for one in job.learners
    ]
    left = [one.captured[0] + one.captured[1] * size for one in job.learners]
    for number, one in enumerate(job.learners):
        if one.zero_stage == 3:
            left[number] += FLOAT * one.projection
    moments = []
    for number, memory in enumerate(memories):
        others = [*memories[:number], *(memories[number + 1 :] if accumulates else ())]
        waiting = sum(other.waiting for other in others)
        moments.append(waiting + memory.at_work + sum(left[:number]))
    peak = sum(memory.states for memory in memories) + max(moments)
    needed = peak * (1 + machine.fragmented) + machine.reserved_gb * 1e9
    named = {one.name: memory for one, memory in zip(job.learners, memories, strict=True)}
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
    """The same job with these ZeRO stages; frozen learners keep theirs, except the teacher."""
    stages = [teacher, *[students] * (len(job.learners) - 1)]
    learners = tuple(
        replace(one, zero_stage=stage) if one.trained or not number else one
        for number, (one, stage) in enumerate(zip(job.learners, stages, strict=True))
    )
    return replace(job, learners=learners)


def largest_micro_batch(job: JobFacts, machine: Machine, sizes: Sequence[int]) -> int | None:
    """The largest of `sizes` that fits into a GPU's memory; None if none does."""
    room = machine.device.memory_gb * 1e9
    fitting = [size for size in sizes if job_memory(job, machine, size).needed <= room]
    return max(fitting, default=None)
