"""The machine of a plan, with its assumptions and their defaults, and how long a step takes on it.

A step is matrix products at a stated MFU, the update, and communication. For small models and small
micro-batches the number of kernel launches is the limit instead.

Collectives, per step and learner, of gradients and parameters (4 P bytes each; with bf16
communication gradients, and what stage 3 gathers, take 2 P, and bf16 weights at any stage):

- stage 0: one all-reduce after the last backward pass, not overlapped.
- stage 1: a reduce-scatter after the last backward pass, not overlapped, and an all-gather of the
  updated parameters.
- stage 2: the same, but gradients are reduced after every micro-batch.
- stages 1 and 2 with states in host memory: an all-reduce per bucket, during the backward pass.
- stage 3: an all-gather of parameters for each forward and each backward pass, and a reduce-scatter
  of gradients.

An all-reduce sends 2 (n - 1) / n of its bytes, a gather or scatter half of that. Within a node the
bytes go over the GPUs' links, and between nodes over all network adapters of a node at once. The
slower of the two counts (a pipelined ring). Each collective adds a latency that grows with the
logarithm of nodes and GPUs (trees).
"""

import math
from dataclasses import dataclass

from configs.devices import DeviceConfig
from configs.plan_facts import JobFacts, LearnerFacts

# Meta's Llama 3 run: 419 unexpected interruptions in 54 days on 16,384 H100s (arXiv 2407.21783,
# section 3.3.4): one per GPU in 50,700 hours. A node with 8 GPUs fails every 6,300 hours.
NODE_MTBF_HOURS = 6300.0
FLOAT = 4


@dataclass(frozen=True)
class Machine:
    """Identical nodes, and the assumptions about them.

    Attributes:
        mfu: model FLOPs utilization of a step's forward and backward passes, 0 to 1.
        launch: seconds that a device needs for the smallest kernel.
        busy_bandwidth: fraction of the links' peak bandwidth that collectives reach.
        latency: seconds per hop of a collective between nodes (within a node: a third).
        reserved_gb: memory of each GPU for the context, libraries and NCCL's buffers.
        fragmented: memory lost in the caching allocator, as a fraction of what is allocated.
        copy_gbs, store_gbs: GB/s of a checkpoint, from one GPU to its host and from all to storage.
        restart_seconds: from a failure to the next step: detection, requeue and loading.
        time_limit: seconds of one start of the job; None for no limit.
        warning_seconds: how long before the time limit the ranks save.
        host_gb: a rank's memory on the host for Python, libraries and the GPU's driver.
        price: per GPU hour, in any currency.
    """

    device: DeviceConfig
    nodes: int = 1
    gpus_per_node: int = 8
    overlaps: bool = True  # reductions overlap the backward pass, with a second bucket
    mfu: float = 0.30
    launch: float = 4e-6
    busy_bandwidth: float = 0.8
    latency: float = 15e-6
    reserved_gb: float = 2.0
    fragmented: float = 0.05
    copy_gbs: float = 10.0
    store_gbs: float = 2.0
    node_mtbf_hours: float = NODE_MTBF_HOURS
    restart_seconds: float = 600.0
    time_limit: int | None = None
    warning_seconds: int = 300
    host_gb: float = 4.0
    price: float | None = None

    @property
    def ranks(self) -> int:
        """The world size: one rank per GPU."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class LearnerTime:
    """Seconds of one learner in one step on one rank.

    Attributes:
        hidden: the part of `communication` that overlaps the backward pass.
        sent: bytes.
    """

    forward: float
    backward: float
    update: float
    communication: float
    hidden: float
    sent: float

    @property
    def total(self) -> float:
        """The learner's share of the step."""
        return self.forward + self.backward + self.update + self.exposed

    @property
    def exposed(self) -> float:
        """Its communication that nothing overlaps."""
        return self.communication - self.hidden


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: each learner's, and their sums weighted by `LearnerFacts.active`.

    Attributes:
        exposed: of communication that nothing overlaps.
    """

    learners: dict[str, LearnerTime]
    seconds: float
    exposed: float
    tokens_per_second: float
    flops: float  # matrix products of a step, on all ranks


def step_time(job: JobFacts, machine: Machine) -> StepTime:
    """The time of one step of `job`, with each learner at its own stage."""
    rows = job.rows / machine.ranks
    passes = math.ceil(rows / min(job.micro_batch, rows))
    times = {
        learner.name: _learner_time(learner, machine, rows, passes) for learner in job.learners
    }
    seconds = sum(learner.active * times[learner.name].total for learner in job.learners)
    exposed = sum(learner.active * times[learner.name].exposed for learner in job.learners)
    flops = sum(
        learner.active * (learner.forward_flops + learner.backward_flops)
        for learner in job.learners
    )
    return StepTime(
        learners=times,
        seconds=seconds,
        exposed=exposed,
        tokens_per_second=job.rows * job.length / seconds,
        flops=flops * job.rows,
    )


def _learner_time(learner: LearnerFacts, machine: Machine, rows: float, passes: int) -> LearnerTime:
    flops = learner.forward_flops + learner.backward_flops
    rate = machine.device.flops(learner.precision) * machine.mfu
    computing = max(rows * flops / rate, passes * learner.kernels * machine.launch)
    backward = computing * learner.backward_flops / flops if flops else 0.0  # stored predictions
    reduce, gather, reductions = _collectives(learner, machine, passes)
    beside = 0.0
    if machine.overlaps and learner.has_buckets:
        # The last bucket is reduced after the backward pass; the others overlap it.
        buckets = math.ceil(learner.trained / learner.bucket)
        beside = min(reduce * (buckets - 1) / buckets, backward * min(1.0, reductions / passes))
        if learner.zero_stage == 3:
            beside = min(reduce + gather, beside + 0.8 * gather)  # prefetched
    share = machine.ranks if learner.zero_stage else 1
    return LearnerTime(
        forward=computing - backward,
        backward=backward,
        update=_update_bytes(learner) / share / (machine.device.memory_bandwidth * 1e9),
        communication=reduce + gather,
        hidden=beside,
        sent=_sent(learner, machine, passes),
    )


def _update_bytes(learner: LearnerFacts) -> float:
    """Bytes of an update: parameter, gradient and states are read; parameter and states written."""
    return FLOAT * learner.trained * (3 + 2 * learner.states)


def _collectives(learner: LearnerFacts, machine: Machine, passes: int) -> tuple[float, float, int]:
    """Seconds of reducing gradients, seconds of gathering parameters, and reductions per step."""
    if machine.ranks == 1:
        return 0.0, 0.0, 1
    size, stage = learner.exchanged * learner.trained, learner.zero_stage
    calls = math.ceil(learner.trained / learner.bucket) if stage else 1
    reductions = passes if stage >= 2 else 1
    if stage == 3:
        gathers = 2 * passes if learner.trained else passes
        gather = gathers * collective(_gathered(learner), 1, machine, calls)
        return passes * collective(size, 1, machine, calls), gather, reductions
    how = (2, machine, calls) if learner.has_buckets or not stage else (1, machine, 1)
    reduce = reductions * collective(size, *how) if size else 0.0
    updated = learner.weight_bytes * learner.trained
    return reduce, collective(updated, 1, machine, calls) if stage and size else 0.0, reductions


def _gathered(learner: LearnerFacts) -> int:
    """Bytes of the parameters when stage 3 gathers them all."""
    return min(learner.exchanged, learner.weight_bytes) * learner.parameters


def collective(size: float, rounds: int, machine: Machine, calls: int = 1) -> float:
    """Seconds of `calls` collectives of `size` bytes in total; `rounds`: 2 for an all-reduce."""
    device, nodes, gpus = machine.device, machine.nodes, machine.gpus_per_node
    ranks = machine.ranks
    link = rounds * size * (ranks - 1) / ranks / (device.link_bandwidth * 1e9)
    network = rounds * size * (nodes - 1) / nodes / (gpus * device.network_bandwidth * 1e9)
    hops = math.log2(nodes) + math.log2(gpus) / 3
    moving = max(link if gpus > 1 else 0.0, network) / machine.busy_bandwidth
    return moving + calls * rounds * hops * machine.latency


def _sent(learner: LearnerFacts, machine: Machine, passes: int) -> float:
    """Bytes that a rank sends per step."""
    size, ranks = learner.exchanged * learner.trained, machine.ranks
    updated, parameters = learner.weight_bytes * learner.trained, _gathered(learner)
    rounds = 2 if learner.has_buckets else 1
    by_stage = (
        2 * size,
        rounds * size + updated,
        rounds * passes * size + updated,
        passes * size + (2 if learner.trained else 1) * passes * parameters,
    )
    return (ranks - 1) / ranks * by_stage[learner.zero_stage]
