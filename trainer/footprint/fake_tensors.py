"""Tensors with a shape, strides, a dtype and a storage's size, but without data.

``torch._subclasses.FakeTensorMode`` serves tracers: it has every device, symbols and guards. A plan
repeats the same operations for each layer on one device. Here an operation on tensors like earlier
ones is a look-up, which takes a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm as axes_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

CPU, META = torch.device("cpu"), torch.device("meta")


class FakeTensor(Tensor):
    """A tensor on the CPU without data; only `FakeMode` can compute with it."""

    @staticmethod
    def __new__(cls, like: Tensor) -> FakeTensor:
        return Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            dtype=like.dtype,
            device=CPU,
            storage_size=like.untyped_storage().nbytes(),
        )

    @classmethod
    def of_bytes(cls, number: int) -> FakeTensor:
        """A tensor of this many bytes."""
        return Tensor._make_wrapper_subclass(
            cls, (number,), dtype=torch.uint8, device=CPU, storage_size=number
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise AssertionError(f"{function} of a fake tensor outside of FakeMode")


class _Result(NamedTuple):
    """A tensor that an operation returns: of `argument`, by its number, it is a view or itself."""

    like: Tensor  # on meta
    argument: int | None
    is_itself: bool

    def among(self, arguments: Sequence[Tensor]) -> Tensor:
        """The result, for these arguments."""
        if self.argument is None:
            return FakeTensor(self.like)
        if self.is_itself:
            return arguments[self.argument]
        view = FakeTensor(self.like)
        torch._functionalize_unsafe_set(view, arguments[self.argument])
        return view


class FakeMode(TorchDispatchMode):
    """Runs operations on meta tensors, once for tensors of the same shapes, strides and dtypes.

    A number that is read from a tensor is 0: libraries ask whether a mask hides anything.
    """

    def __init__(self) -> None:
        super().__init__()
        self._results: dict[Any, Any] = {}

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
        given: list[Tensor] = []
        key = function, layouts(arguments, given), layouts(keywords.items(), given)
        if key not in self._results:
            self._results[key] = _run(function, arguments, keywords)
        return _fake(self._results[key], given)


def layouts(values: Iterable[Any], tensors: list[Tensor]) -> tuple[Any, ...]:
    """The part of values that decides an operation's result; collects the `tensors` among them."""
    key: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
            key += value.shape, value.stride(), value.dtype
        elif isinstance(value, (list, tuple)):
            key.append(layouts(value, tensors))
        else:
            key += type(value), value
    return tuple(key)


def _run(function: Any, arguments: Any, keywords: Mapping[str, Any]) -> Any:
    """Run an operation on meta tensors; returns its results, each tensor as a `_Result`."""
    if function is torch.ops.aten._local_scalar_dense.default:
        return torch.zeros((), dtype=arguments[0].dtype).item()
    metas: list[Tensor] = []

    def to_meta(tensor: Tensor) -> Tensor:
        layout = tensor.shape, tensor.stride()
        metas.append(torch.empty_strided(*layout, dtype=tensor.dtype, device=META))
        return metas[-1]

    def described(tensor: Tensor) -> _Result:
        storages = [meta.untyped_storage()._cdata for meta in metas]
        storage = tensor.untyped_storage()._cdata
        argument = storages.index(storage) if storage in storages else None
        return _Result(tensor, argument, argument is not None and tensor is metas[argument])

    device = {"device": META} if "device" in keywords else {}
    on_meta, named = tree_map_only(Tensor, to_meta, (arguments, {**keywords, **device}))
    return tree_map_only(Tensor, described, rule_of(function, keywords)(*on_meta, **named))


def _fake(results: Any, arguments: Sequence[Tensor]) -> Any:
    """Fake tensors in place of each `_Result`, for these arguments."""
    if isinstance(results, _Result):
        return results.among(arguments)
    if isinstance(results, (list, tuple)):
        return [_fake(result, arguments) for result in results]
    return results


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
