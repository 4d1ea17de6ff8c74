"""The kernels that a GPU is given, and the least time that they take on a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from configs.devices import DeviceConfig

if TYPE_CHECKING:
    from typing import Self  # of Python 3.11 on

OF_PEAK, OF_BANDWIDTH = 0.70, 0.85  # what large matrix products and copies reach
SMALLEST, LAUNCH = 2.5e-6, 6e-6  # seconds of the smallest kernel, and of its launch by Python
# Operations that launch nothing: they allocate, or return a view without saying so.
NO_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("_unsafe_view", "_reshape_alias", "lift_fresh"),
}


@dataclass(frozen=True)
class Kernel:
    """One kernel: its name, FLOPs of matrix products, and the bytes it reads and writes."""

    name: str
    flops: int
    bytes: int

    def seconds(self, device: DeviceConfig, precision: str) -> float:
        """The least time that it takes."""
        flops = device.flops(precision)
        if self.name == "_scaled_mm":
            flops = 1e12 * device.tflops["fp8"]
        computing = self.flops / (OF_PEAK * flops)
        moving = self.bytes / (OF_BANDWIDTH * 1e9 * device.memory_bandwidth)
        return max(computing, moving, SMALLEST)


class Kernels(TorchDispatchMode):
    """Collects the kernels of a block: one for each operation that is no view.

    active: the last one that was entered.
    """

    active: ClassVar[Kernels]

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Kernel] = []
        self._is_replaced = False

    def __enter__(self) -> Self:
        Kernels.active = self
        super().__enter__()
        return self

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Graphs are cut as without this mode."""
        return True

    @contextlib.contextmanager
    def replaced_by(self, fused: Iterable[Kernel]) -> Iterator[None]:
        """Collect these kernels, in place of those of the operators in the block."""
        self.all += fused
        self._is_replaced = True
        try:
            yield
        finally:
            self._is_replaced = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        packet = function.overloadpacket
        name = packet.__name__
        is_kernel = function.namespace in ("aten", "torch_attn") and not function.is_view
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        is_empty = bool(results) and not any(t.numel() for t in results)  # none is launched
        if is_kernel and name not in NO_KERNEL and not is_empty and not self._is_replaced:
            count = flop_registry.get(packet)
            flops = count(*args, **kwargs, out_val=result) if count else 0
            self.all.append(Kernel(name, flops, _bytes(name, (args, kwargs), result)))
        return result


def _bytes(name: str, given: Any, result: Any) -> int:
    """The bytes that a kernel reads and writes. A lookup reads only the rows that it returns."""
    if name == "embedding":
        return 2 * int(result.nbytes)
    tensors = [leaf for leaf in tree_leaves((given, result)) if isinstance(leaf, Tensor)]
    by_place = {(t.untyped_storage()._cdata, t.storage_offset(), t.numel()): t for t in tensors}
    return sum(tensor.nbytes for tensor in by_place.values())


@dataclass(frozen=True)
class Ceiling:
    """Seconds of a learner's pass: of the model's products at the peak, and the least possible.

    launched: the least possible where the host launches every kernel.
    """

    peak: float = 0.0
    least: float = 0.0
    launched: float = 0.0

    @classmethod
    def of(
        cls, kernels: Iterable[Kernel], device: DeviceConfig, precision: str, flops: float
    ) -> Ceiling:
        """The ceiling of one learner, whose model's matrix products take these FLOPs."""
        seconds = [kernel.seconds(device, precision) for kernel in kernels]
        launched = max(sum(seconds), LAUNCH * len(seconds))
        return cls(flops / device.flops(precision), sum(seconds), launched)

    def __add__(self, other: Ceiling) -> Ceiling:
        return Ceiling(
            self.peak + other.peak, self.least + other.least, self.launched + other.launched
        )

    def __str__(self) -> str:
        mfu, launched = self.peak / self.least, self.peak / self.launched
        return f"{1e3 * self.least:.1f} ms, {mfu:.1%}, {launched:.1%}"
