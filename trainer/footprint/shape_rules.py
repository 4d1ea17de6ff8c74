"""The results of frequent operations on meta tensors, without torch's meta kernels of these.

Those are written in Python. They take several times as long, and load torch's compiler, a second.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm as axes_of
from torch.utils._pytree import tree_map_only

_NATIVE = torch.ops.aten


def rule_of(function: Any, keywords: Any) -> Callable[..., Any]:
    """Returns the results of an operation on meta tensors: by a rule, or by `function` itself."""
    returned = function._schema.returns
    if len(returned) == 1 and returned[0].alias_info and returned[0].alias_info.is_write:
        return _changed
    is_random = torch.Tag.nondeterministic_seeded in function.tags
    if torch.Tag.pointwise in function.tags and not is_random and "memory_format" not in keywords:
        return partial(_pointwise, function)
    return _RULES.get(function, function)


def _changed(*arguments: Any, **keywords: Any) -> Tensor:
    """The argument that an operation writes to."""
    written: Tensor = keywords["out"] if "out" in keywords else arguments[0]
    return written


def _pointwise(function: Any, *arguments: Any, **keywords: Any) -> Tensor:
    """The result's dtype is that of the operation on a single element."""
    tensors: list[Tensor] = []

    def element_of(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return torch.zeros([1] * tensor.ndim, dtype=tensor.dtype)

    elements, named = tree_map_only(Tensor, element_of, (arguments, keywords))
    dtype = function(*elements, **named).dtype
    tensors = [*torch.broadcast_tensors(*tensors)]
    axes, _ = axes_of(*tensors)
    return torch.empty_permuted(tensors[0].shape, axes, dtype=dtype, device="meta")


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    first = tensors[0]
    shape = [*first.shape]
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return first.new_empty(shape)


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return _cat([tensor.unsqueeze(dim) for tensor in tensors], dim)


def _layer_norm(x: Tensor, normalized: Sequence[int], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and the mean and deviation of each row."""
    rows = *x.shape[: -len(normalized)], *(1 for _ in normalized)
    mean, deviation = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return x.new_empty(x.shape), mean, deviation


def _layer_norm_backward(
    gradient: Tensor, x: Tensor, normalized: Any, mean: Any, deviation: Any, *others: Any
) -> list[Tensor | None]:
    """The gradients of x, weight and bias, as far as they are asked for."""
    *parameters, are_asked = others
    return [
        tensor.new_empty(tensor.shape) if is_asked and tensor is not None else None
        for tensor, is_asked in zip([x, *parameters], are_asked, strict=True)
    ]


def _arange(*arguments: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return torch.arange(*arguments, dtype=dtype)


_RULES = {
    _NATIVE.cat.default: _cat,
    _NATIVE.stack.default: _stack,
    _NATIVE.native_layer_norm.default: _layer_norm,
    _NATIVE.native_layer_norm_backward.default: _layer_norm_backward,
    _NATIVE.arange.default: _arange,
    _NATIVE.arange.start_step: _arange,
}
