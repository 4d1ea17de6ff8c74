"""A counter of the bytes, operations and matrix products of what runs."""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper


def _attention(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
    """FLOPs of fused attention on a CPU; torch's counter knows the GPU kernels only."""
    return 4 * math.prod(q) * k[-2]


def _attention_backward(grad: Any, q: Sequence[int], k: Sequence[int], *_: Any, **__: Any) -> int:
    return 2 * _attention(q, k, k)  # without the kernel's recomputation


KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}  # operations that torch's counter does not know


@dataclass
class Cost:
    """A part of a step: its operations and bytes.

    kept: bytes that are alive at its end and were not before; peak: the most bytes meanwhile.
    """

    flops: int = 0
    kernels: int = 0
    kept: int = 0
    peak: int = 0


class Work(TorchDispatchMode):
    """Counts the bytes of storages created under it: those alive `now`, and their peak.

    `kernels` counts the operations that did more than create a view of a tensor, `flops` those of
    matrix products. It is one mode for all of them, since each mode costs every operation time.
    """

    def __init__(self, kernel_flops: Mapping[Any, Callable[..., int]] | None = None) -> None:
        """kernel_flops: of operations that torch's counter does not know, by shapes."""
        super().__init__()
        formulas = {**KERNELS, **(kernel_flops or {})}
        wrapped = {kernel: shape_wrapper(formula) for kernel, formula in formulas.items()}
        self._flops_of = {**flop_registry, **wrapped}
        self.flops = 0
        self.kernels = 0
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = keywords or {}
        result = function(*arguments, **keywords)
        if function.namespace != "aten" or function.is_view:
            return result  # queries and views
        self.kernels += 1
        if count := self._flops_of.get(function.overloadpacket):
            self.flops += count(*arguments, **keywords, out_val=result)
        given = {storage_of(leaf) for leaf in tensors_among((arguments, keywords.values()))}
        for leaf in tensors_among((result,)):
            if not leaf.is_meta and storage_of(leaf) not in given:
                self._add(leaf.untyped_storage())
        return result

    @contextlib.contextmanager
    def aside(self) -> Iterator[Cost]:
        """Measure what runs in the block, and count nothing of it but the tensors that stay."""
        flops, kernels, now, peak = self.flops, self.kernels, self.now, self.peak
        self.peak = now
        cost = Cost()
        yield cost
        cost.flops, cost.kernels = self.flops - flops, self.kernels - kernels
        cost.kept, cost.peak = self.now - now, self.peak - now
        self.flops, self.kernels, self.peak = flops, kernels, peak

    def repeat(self, cost: Cost) -> None:
        """Count what has been measured aside, but not the tensors that stay."""
        self.flops += cost.flops
        self.kernels += cost.kernels
        self.peak = max(self.peak, self.now + cost.peak)

    def hold(self, tensor: Tensor) -> Tensor:
        """Count a tensor as long as it is alive."""
        self._add(tensor.untyped_storage())
        return tensor

    def set_aside(self, tensor: Tensor | None) -> None:
        """Stop counting a tensor, although it stays alive."""
        if tensor is not None:
            self._remove(storage_of(tensor))

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, storage._cdata)

    def _remove(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


def tensors_among(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments or results, and in sequences of these."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Iterable) and not isinstance(value, str):
            yield from tensors_among(value)


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's storage, as long as it is alive."""
    return tensor.untyped_storage()._cdata
