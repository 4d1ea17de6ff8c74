"""The dtype of matrix products, decided here for every part of the model."""

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_planned_for: str | None = None


@contextlib.contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """Choose kernels for this device type, whatever device the tensors are on.

    Planning uses it with fake tensors on the CPU, on a machine without GPUs. "gpu" selects kernels
    that every GPU has.
    """
    global _planned_for
    _planned_for = device
    try:
        yield
    finally:
        _planned_for = None


def kernel_device(device: torch.device) -> str:
    """The device type for which kernels are chosen: the tensors', unless `kernels_of` is active."""
    return _planned_for or device.type


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product's operands: that of autocast if it is on, else that of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def is_native(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the device has instructions for matrix products in this dtype (`kernel_device`).

    A CPU without them takes up to 50 times as long as in float32. There the operands are rounded to
    the narrow dtype and multiplied in float32, and the result is rounded. This gives the result of
    the instructions at the speed of float32.
    """
    is_narrow = dtype in (torch.bfloat16, torch.float16)
    return not is_narrow or kernel_device(device) != "cpu" or _cpu_has(dtype)


@lru_cache
def _cpu_has(dtype: torch.dtype) -> bool:
    mkldnn = torch.ops.mkldnn
    if dtype == torch.bfloat16:
        return bool(mkldnn._is_mkldnn_bf16_supported())
    return bool(mkldnn._is_mkldnn_fp16_supported())


def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight' + bias`` computed natively or in float32: [..., inputs] to [..., outputs]."""
    dtype = product_dtype(x)
    if is_native(x.device, dtype):
        return F.linear(x, weight, bias)
    bias = None if bias is None else rounded(bias, dtype)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(rounded(x, dtype), rounded(weight, dtype), bias).to(dtype)


class Dense(nn.Linear):
    """``x @ weight' + bias`` in the dtype of autocast, or as its `product` computes it."""

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(project)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inputs] to [..., outputs]."""
        return self.product(x, self.weight, self.bias)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of x rounded to `dtype`, stored in float32."""
    return x.to(dtype).to(torch.float32)
