"""What a plan is made from: numbers of the job, and numbers of the machine with their defaults."""

from __future__ import annotations

from dataclasses import dataclass

from configs.devices import DeviceConfig

# Meta's Llama 3 run: 419 unexpected interruptions in 54 days on 16,384 H100s (arXiv 2407.21783,
# section 3.3.4), so one per GPU in 50,700 hours; with 8 GPUs a node fails every 6,300 hours.
NODE_MTBF_HOURS = 6300.0


@dataclass(frozen=True)
class LearnerFacts:
    """One learner. Bytes are of one rank; flops are matrix products of one sequence.

    Attributes:
        trained: parameters with a gradient, all float32; 0 for a frozen teacher.
        bucket: elements of DeepSpeed's reduction bucket.
        kernels: launched in a micro-batch's forward and backward.
        activations, captured: bytes that a micro-batch holds, as (fixed, for each sequence);
            captured is what it leaves for the learners after it.
        projection: elements of the vocabulary projection that students read; 0 when none does.
        active: share of the job's steps in which it trains.
    """

    name: str
    zero_stage: int
    precision: str
    parameters: int
    trained: int
    bucket: int
    forward_flops: float
    backward_flops: float
    kernels: int
    activations: tuple[float, float]
    captured: tuple[float, float] = (0.0, 0.0)
    projection: int = 0
    offloaded: bool = False
    active: float = 1.0


@dataclass(frozen=True)
class JobFacts:
    """A job: `rows` sequences of `length` tokens (on average) a step; the teacher comes first.

    `assumed` says, a line each, what of the job these numbers simplify.
    """

    name: str
    steps: int
    rows: int
    length: float
    micro_batch: int
    checkpoint_every: int
    learners: tuple[LearnerFacts, ...]
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """Nodes alike, and what is assumed of them.

    Attributes:
        mfu: share of the peak rate that matrix products reach, over a whole step's computing.
        launch: seconds that a device needs for the least of kernels.
        busy_bandwidth: share of the links' peak that collectives reach.
        latency: seconds for a collective's step from node to node (within one: a third).
        reserved_gb: of each GPU's memory: context, libraries, NCCL's buffers.
        fragmented: share of what is allocated that the caching allocator holds besides.
        copy_gbs, store_gbs: a checkpoint's way from one GPU to its host, and from all to storage.
        restart_seconds: from a failure to the next step: noticing it, requeueing, loading.
        price: of an hour of one GPU, in any currency.
    """

    device: DeviceConfig
    nodes: int = 1
    gpus_per_node: int = 8
    overlaps: bool = True  # reductions run beside the backward pass, with a second bucket
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
    price: float | None = None

    @property
    def ranks(self) -> int:
        """One per GPU."""
        return self.nodes * self.gpus_per_node
