"""The inputs of a plan: numbers of the job, and numbers of the machine with their defaults."""

from __future__ import annotations

from dataclasses import dataclass

from configs.devices import DeviceConfig

# Meta's Llama 3 run: 419 unexpected interruptions in 54 days on 16,384 H100s (arXiv 2407.21783,
# section 3.3.4): one per GPU in 50,700 hours. A node with 8 GPUs fails every 6,300 hours.
NODE_MTBF_HOURS = 6300.0


@dataclass(frozen=True)
class LearnerFacts:
    """One learner. Bytes are per rank; flops are those of the matrix products of one sequence.

    Attributes:
        trained: parameters with a gradient, all float32; 0 for a frozen teacher.
        exchanged: bytes of each gradient, and at stage 3 of each parameter, that ranks exchange.
        bucket: elements in DeepSpeed's reduction bucket.
        kernels: kernel launches in the forward and backward pass of a micro-batch.
        activations, captured: bytes of a micro-batch, as (fixed, per sequence); `captured` stays
            for the learners after this one.
        projection: elements of the vocabulary projection that students read; 0 if none reads it.
        active: fraction of the job's steps in which the learner takes part.
        training: fraction of the job's steps in which a teacher trains; in the others it only
            teaches, and its flops are the mean of both.
        teaches: whether students learn from it.
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
    training: float = 1.0
    teaches: bool = False
    exchanged: int = 4


@dataclass(frozen=True)
class StoredFacts:
    """A frozen teacher's stored predictions, which a job reads instead of running the teacher.

    Attributes:
        top_k: logits of a masked position, each in this `precision`.
        position_bytes: bytes of a masked position; bytes: of all that the job reads.
    """

    top_k: int
    precision: str
    position_bytes: int
    bytes: float


@dataclass(frozen=True)
class CacheFacts:
    """Corpora behind URLs, of which a node caches whole shards.

    Attributes:
        shard_bytes: bytes of a shard; limit_gb: what the job lets a node cache.
    """

    shard_bytes: float
    limit_gb: float


@dataclass(frozen=True)
class JobFacts:
    """A job: `rows` sequences of `length` tokens (on average) per step.

    The teacher comes first, and further ones, which are frozen, before the students.

    `assumed` has a line for each simplification of the job.
    """

    name: str
    steps: int
    rows: int
    length: float
    micro_batch: int
    checkpoint_every: int
    learners: tuple[LearnerFacts, ...]
    assumed: tuple[str, ...] = ()
    stored: StoredFacts | None = None
    cache: CacheFacts | None = None  # None where all corpora are folders


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
    price: float | None = None

    @property
    def ranks(self) -> int:
        """The world size: one rank per GPU."""
        return self.nodes * self.gpus_per_node
