"""Accelerators: what one can compute, hold and send, for planning and for the MFU in metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from configs.loading import SHIPPED, load
from configs.rules import Doc, OneOf, Unit, positive
from configs.section import Refusal, Section

KIND = "device"


@dataclass
class DeviceConfig(Section):
    """One kind of accelerator in one kind of node; rates are a maker's dense peaks."""

    memory_gb: Annotated[float, positive(1e9), Unit("GB"), Doc("Memory of one accelerator.")]
    tflops: Annotated[
        dict[Annotated[str, OneOf("fp32", "bf16", "fp16")], float],
        positive(1e9),
        Unit("TFLOP/s"),
        Doc("Matrix products by precision; `fp32` stands in for a precision that is not there."),
    ]
    memory_bandwidth: Annotated[
        float, positive(1e9), Unit("GB/s"), Doc("Of the accelerator's own memory.")
    ]
    link_bandwidth: Annotated[
        float, positive(1e9), Unit("GB/s"), Doc("To another accelerator of the node, one way.")
    ]
    network_bandwidth: Annotated[
        float, positive(1e9), Unit("GB/s"), Doc("To another node, for each accelerator.")
    ]
    names: Annotated[list[str], Doc("Parts of what `torch.cuda.get_device_name` says of it.")] = (
        field(default_factory=list)
    )

    def conflicts(self) -> Iterator[Refusal]:
        if "fp32" not in self.tflops:
            yield "tflops", "needs a number for fp32 at least"

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
