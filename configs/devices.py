"""Accelerators: peak FLOPs, memory and bandwidths, for planning and for the MFU in metrics."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from configs.loading import SHIPPED, load
from configs.rules import COUNT, OneOf, Unit, positive
from configs.section import Refusal, Section

KIND = "device"


@dataclass
class DeviceConfig(Section):
    """One type of accelerator in one type of node; rates are the vendor's dense peaks."""

    memory_gb: Annotated[float, positive(1e9), Unit("GB"), "Memory of one accelerator."]
    tflops: Annotated[
        dict[Annotated[str, OneOf("fp32", "bf16", "fp16", "fp8")], float],
        positive(1e9),
        Unit("TFLOP/s"),
        "Dense matrix products, by precision; a missing precision has the rate of "
        "`fp32`. For a GPU with TF32 give its TF32 rate as `fp32`, since products in "
        "fp32 use it.",
    ]
    memory_bandwidth: Annotated[
        float, positive(1e9), Unit("GB/s"), "Bandwidth of the accelerator's memory."
    ]
    link_bandwidth: Annotated[
        float, positive(1e9), Unit("GB/s"), "Bandwidth to another GPU of the node, one way."
    ]
    network_bandwidth: Annotated[
        float, positive(1e9), Unit("GB/s"), "Bandwidth to another node, per GPU."
    ]
    names: Annotated[list[str], "Ends of `torch.cuda.get_device_name`."] = field(
        default_factory=list
    )
    per_node: Annotated[
        int, COUNT, "Accelerators of a usual node, which `tandem plan` assumes."
    ] = 8
    is_cpu: Annotated[
        bool, "A CPU: its memory is the node's memory, and a rank has all of its cores."
    ] = False

    def conflicts(self) -> Iterator[Refusal]:
        if "fp32" not in self.tflops:
            yield "tflops", "must have a number for fp32"

    @property
    def unit(self) -> str:
        """The word for it: CPU or GPU."""
        return "CPU" if self.is_cpu else "GPU"

    def flops(self, precision: str) -> float:
        """Peak FLOP/s for the MFU at a precision; that of fp32 if it is missing.

        With fp8 it is that of bf16, in which a learner computes everything but its layers.
        """
        kind = "bf16" if precision in ("bf16_weights", "fp8") else precision
        return 1e12 * self.tflops.get(kind, self.tflops["fp32"])


def device_named(name: str) -> DeviceConfig | None:
    """The shipped device with this ``torch.cuda.get_device_name``; None if it is unknown."""
    for path in sorted((SHIPPED / KIND).glob("*.yaml")):
        device = load(path.stem, DeviceConfig, KIND)
        if name.endswith(tuple(device.names)):
            return device
    return None
