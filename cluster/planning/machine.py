"""The machine of a plan: its numbers, and assumptions about it with their defaults."""

from __future__ import annotations

from dataclasses import dataclass

from configs.devices import DeviceConfig

# Meta's Llama 3 run: 419 unexpected interruptions in 54 days on 16,384 H100s (arXiv 2407.21783,
# section 3.3.4): one per GPU in 50,700 hours. A node with 8 GPUs fails every 6,300 hours.
NODE_MTBF_HOURS = 6300.0


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
