"""Accelerators: what one can compute, hold and send, for planning and for the MFU in metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from configs.bounds import positive, require_bounds
from configs.loading import SHIPPED, load

KIND = "device"


@dataclass
class DeviceConfig:
    """One kind of accelerator in one kind of node; rates are a maker's dense peaks.

    `names` are parts of what ``torch.cuda.get_device_name`` says of it. Bandwidths are in GB/s
    (1e9 bytes): of the memory; to another GPU of the node, one way; to another node, for each GPU.
    """

    memory_gb: float
    tflops: dict[str, float]  # by precision: fp32, bf16, fp16
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Refuse what nothing can be computed from."""
        if "fp32" not in self.tflops:
            raise ValueError("tflops: needs a number for fp32 at least")
        figures = ("memory_gb", "memory_bandwidth", "link_bandwidth", "network_bandwidth", "tflops")
        require_bounds(self, **dict.fromkeys(figures, positive(1e9)))

    def flops(self, precision: str) -> float:
        """Operations per second of matrix products at a precision; of float32 if it has none."""
        return 1e12 * self.tflops.get(precision, self.tflops["fp32"])


def device_named(name: str) -> DeviceConfig | None:
    """The shipped device with this ``torch.cuda.get_device_name``; None when it is unknown."""
    for path in sorted((SHIPPED / KIND).glob("*.yaml")):
        device = load(path.stem, DeviceConfig, KIND)
        if any(part in name for part in device.names):
            return device
    return None
