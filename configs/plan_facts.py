"""A job in plain numbers: what the trainer works out of it, and the planner reads."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LearnerFacts:
    """One learner. Bytes are per rank; flops are those of the matrix products of one sequence.

    Attributes:
        trained: parameters with a gradient; 0 for a frozen teacher.
        weight_bytes: bytes of each parameter; with 2 there are float32 masters of the trained.
        exchanged: bytes of each gradient that ranks exchange, and at most as many of each parameter
            at stage 3.
        states: elements of optimizer states for each trained parameter, on average.
        bucket: elements in DeepSpeed's reduction bucket.
        kernels: kernel launches in the forward and backward pass of a micro-batch.
        activations, captured: bytes of a micro-batch, as (fixed, per sequence); `captured` stays
            for the learners after this one.
        projection: elements of the vocabulary projection and word embedding that others read; at
            stage 3, of copies.
        active: fraction of the job's steps in which the learner takes part.
        training: fraction of the job's steps in which a teacher trains; in the others it only
            teaches, and its flops are the mean of both.
        teaches: whether students learn from it.
        generates: whether it runs before the teachers, one of which reads its samples.
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
    generates: bool = False
    exchanged: int = 4
    weight_bytes: int = 4
    states: float = 2.0

    @property
    def has_buckets(self) -> bool:
        """Whether DeepSpeed reduces its gradients in buckets, beside the backward pass."""
        in_buckets = self.zero_stage == 3 or (self.zero_stage > 0 and self.offloaded)
        return self.trained > 0 and in_buckets


@dataclass(frozen=True)
class StoredFacts:
    """A frozen teacher's stored predictions, which a job reads instead of running the teacher.

    Attributes:
        kept: what is stored of a masked position, in words.
        position_bytes: bytes of a masked position; bytes: of all that the job reads.
    """

    kept: str
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
