"""The dtype of matrix products, decided here for every part of the model, also 8 bits.

In 8-bit floating point, inputs and weights are rounded to e4m3, and gradients to e5m2 (arXiv
2209.05433), with one scale for each tensor; sums are in float32. A tensor's scale follows from its
own largest value in the same pass. It is a power of two, so what a number is rounded to does not
depend on how its batch is cut into micro-batches, except for the very small ones.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

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
    if dtype == torch.float16:
        return bool(mkldnn._is_mkldnn_fp16_supported())
    # oneDNN claims bfloat16 for any AVX-512. Without its instructions, that takes five times as
    # long as float32.
    if torch.backends.cpu.get_cpu_capability() == "AVX512":
        return bool(torch.cpu._is_avx512_bf16_supported())
    return bool(mkldnn._is_mkldnn_bf16_supported())


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


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # of which a GPU requires the sizes of a product's operands
SMALLEST = 2.0**-60  # a largest value that still has a scale


def use_float8(layers: nn.Module) -> None:
    """Let every `Dense` of `layers` compute in 8 bits, where its sizes are multiples of 16."""
    for part in layers.modules():
        if isinstance(part, Dense) and not (
            part.in_features % MULTIPLE or part.out_features % MULTIPLE
        ):
            part.product = float8_linear


def try_float8(device: torch.device) -> None:
    """Compute small products of a forward and a backward pass. Raises RuntimeError where it cannot.

    GPUs differ in what they multiply and in the formats: trying them is surer than a list of them.
    """
    size = (MULTIPLE, MULTIPLE)
    x, weight = (
        torch.ones(size, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(2)
    )
    float8_linear(x, weight, None).sum().backward()


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight' + bias``, of x [..., K] and weight [N, K], in the dtype of autocast."""
    dtype = product_dtype(x)
    with torch.autocast(x.device.type, enabled=False):
        y: Tensor = _Float8Product.apply(x.flatten(0, -2), weight, dtype)
        y = y if bias is None else y + bias.to(dtype)
    return y.unflatten(0, x.shape[:-1])


class _Float8Product(torch.autograd.Function):
    """x [T, K] times the transposed weight [N, K]: [T, N] of `dtype`.

    The backward pass rounds x and the weight again, with the same scales, since others keep them
    too. The weight's gradient is a product over the rows; zeros fill them up to a multiple of 16.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        x_scale, weight_scale = scale_of(x, E4M3), scale_of(weight, E4M3)
        ctx.save_for_backward(x, weight, x_scale, weight_scale)
        left, right = scaled(x, x_scale, E4M3), scaled(weight, weight_scale, E4M3)
        return _product(left, right, x_scale, weight_scale, dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, x_scale, weight_scale = ctx.saved_tensors
        scale = scale_of(gradient, E5M2)
        narrow = scaled(gradient, scale, E5M2)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            right = scaled(weight, weight_scale, E4M3).t().contiguous()
            of_x = _product(narrow, right, scale, weight_scale, x.dtype)
        if ctx.needs_input_grad[1]:
            left, right = (_by_columns(it) for it in (narrow, scaled(x, x_scale, E4M3)))
            of_weight = _product(left, right, scale, x_scale, weight.dtype)
        return of_x, of_weight, None


def scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest power of two, float32 [], that keeps x in the range of `dtype`."""
    largest = x.detach().abs().amax().float().clamp_min(SMALLEST)
    return torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / largest)))


def scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x times its scale, rounded to `dtype`."""
    return (x * scale.to(x.dtype)).to(dtype).contiguous()


def _by_columns(x: Tensor) -> Tensor:
    """x [T, N] of 8 bits as [N, T'], with zeros up to a multiple of 16 rows."""
    fill = -len(x) % MULTIPLE
    if fill:
        x = F.pad(x.view(torch.uint8), (0, 0, 0, fill)).view(x.dtype)
    return x.t().contiguous()


def _product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """left [M, K] times the transposed right [N, K], both divided by their scales: [M, N]."""
    return torch._scaled_mm(
        left,
        right.t(),
        scale_a=left_scale.reciprocal(),
        scale_b=right_scale.reciprocal(),
        out_dtype=dtype,
    )
