"""ZeRO 1 and 2 with the gradients of a backward pass reduced at its end, one tensor a group.

DeepSpeed 0.19.8 calls Python for each parameter, which copies its gradient to a bucket, and loops
over the parameters again at the end. On an H200 this took three times as long as the backward pass
of BERT-large itself (benchmarks/RESULTS.md). Here the host does a few operators for each parameter
group, and the ranks exchange half as many bytes: a reduce-scatter in place of an all-reduce. In
return, no exchange overlaps with the backward pass, and gradients are whole until it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm
from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup
from torch import Tensor
from torch._utils import _flatten_dense_tensors

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def flatten_gradients(engine: DeepSpeedEngine, sent_as: torch.dtype) -> None:
    """Have a new engine at stage 1 or 2 reduce its gradients flat; they are sent as this dtype.

    The optimizer's states must not be in host memory.
    """
    wrapper: Any = engine.optimizer
    for hook in wrapper._grad_acc_hooks:
        hook.remove()
    wrapper._grad_acc_hooks.clear()
    sums: dict[int, Tensor] = {}
    wrapper.backward_epilogue = partial(_collect, wrapper, sums)
    if engine.zero_optimization_stage() == 1:
        wrapper.reduce_gradients = partial(_reduce_sums, wrapper, sums, sent_as)
    else:
        reduce = partial(_add_reduced, wrapper, sums, sent_as)
        wrapper.overlapping_partition_gradients_reduce_epilogue = reduce
    # The parameters are views of flat tensors, and stay so; DeepSpeed makes them anew each step.
    wrapper._update_model_bit16_weights = lambda group: None


@torch.no_grad()
def _collect(wrapper: Any, sums: dict[int, Tensor]) -> None:
    """Stage 1: add the gradients of a backward pass to their sums, whole and in float32."""
    for group, parameters in enumerate(wrapper.bit16_groups):
        if any(parameter.grad is not None for parameter in parameters):
            taken = _take(wrapper, group)
            sums[group] = sums[group].add_(taken) if group in sums else taken.float()


@torch.no_grad()
def _reduce_sums(
    wrapper: Any, sums: dict[int, Tensor], sent_as: torch.dtype, pipeline_parallel: bool = False
) -> None:
    """Stage 1, after a step's last backward pass: this rank's part of the averaged sums."""
    _collect(wrapper, sums)
    groups = range(len(wrapper.bit16_groups))
    _hand_over(
        wrapper,
        _averages([sums.pop(g) if g in sums else _take(wrapper, g) for g in groups], sent_as),
    )


@torch.no_grad()
def _add_reduced(wrapper: Any, sums: dict[int, Tensor], sent_as: torch.dtype) -> None:
    """Stage 2, after each backward pass: add this rank's part of the average to its sum."""
    groups = range(len(wrapper.bit16_groups))
    parts = _averages([_take(wrapper, group) for group in groups], sent_as)
    for group, part in enumerate(parts):
        sums[group] = sums[group].add_(part) if group in sums else part
    if wrapper.is_gradient_accumulation_boundary():
        _hand_over(wrapper, [sums.pop(group) for group in groups])


def _take(wrapper: Any, group: int) -> Tensor:
    """The gradients of a group, laid out as its flat parameters; afterwards there are none.

    Where a parameter has no gradient, and in the padding, there are zeros.
    """
    size, pieces, end = wrapper.bit16_groups_flat[group].numel(), [], 0
    offsets = wrapper.round_robin_bit16_offsets[group]
    for parameter, offset in zip(wrapper.round_robin_bit16_groups[group], offsets, strict=True):
        if offset > end:
            pieces.append(parameter.new_zeros(offset - end))
        gradient, parameter.grad = parameter.grad, None
        pieces.append(torch.zeros_like(parameter) if gradient is None else gradient)
        end = offset + parameter.numel()
    if size > end:
        pieces.append(pieces[-1].new_zeros(size - end))
    return _flatten_dense_tensors(pieces)


def _averages(flats: Sequence[Tensor], sent_as: torch.dtype) -> list[Tensor]:
    """This rank's parts of the means over the ranks, in float32, by one collective."""
    ranks, rank = comm.get_world_size(), comm.get_rank()
    if ranks == 1:
        return [flat.float() for flat in flats]
    sizes = [flat.numel() // ranks for flat in flats]
    by_rank = flats[0].new_empty(ranks, sum(sizes), dtype=sent_as)
    for columns, flat in zip(by_rank.split(sizes, dim=1), flats, strict=True):
        columns.copy_(flat.view(ranks, -1))
    by_rank.div_(ranks)
    comm.reduce_scatter_fn(by_rank[rank], by_rank.view(-1))
    # Copies, of which none keeps all of `by_rank` alive.
    return [part.to(torch.float32, copy=True) for part in by_rank[rank].split(sizes)]


def _hand_over(wrapper: Any, parts: Sequence[Tensor]) -> None:
    """Give the groups' gradients to DeepSpeed's step as it takes those of DeepCompile: flat."""
    for group, part in enumerate(parts):
        wrapper.averaged_gradients[group] = GradPartitionBufferGroup([part], part)
