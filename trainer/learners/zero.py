"""DeepSpeed's ZeRO without what costs a GPU's host a wait, or a learner a collective, for nothing.

Norms, clipping and overflows are the learner's own (`trainer.learners.gradients`), so DeepSpeed's
are left out of its step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import parameter_offload, stage3, stage_1_and_2
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import Tensor, nn
from torch.nn import functional

from trainer.measure.timing import clock

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def streamline(engine: DeepSpeedEngine) -> None:
    """Have a new engine that trains at stages 1 to 3 take its steps without host syncs."""
    wrapper = engine.optimizer
    if engine.zero_optimization_stage() < 3:
        wrapper.compute_grad_norm = False
        return
    wrapper.step = partial(_step_at_stage_3, wrapper)
    if wrapper.persistent_parameters:
        first = wrapper.persistent_parameters[0]  # DeepSpeed has it gather them all
        first.all_gather = partial(_gather_at_once, first)
    if wrapper.reduce_and_partition_stream is not None:
        _let_the_device_wait(wrapper.reduce_and_partition_stream)


def forget(module: nn.Module) -> None:
    """Have DeepSpeed let go of a module whose engine, at stage 3, has been destroyed.

    It stays on a stack, and in a cache without bounds: with its optimizer, it would never be freed.
    """
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [one for one in stack if one is not module]
    _params_to_release.cache_clear()


def gather_flat(module: nn.Module, dtype: torch.dtype) -> None:
    """Have a module at stage 3 gather the parameters of its next layers as one flat tensor.

    They are sent as `dtype`, and float32 again when they arrive. DeepSpeed cuts such a tensor in a
    loop over ranks, twice, and for each of its parameters.
    """
    parameters: Iterable[Any] = module.parameters()
    for parameter in parameters:
        parameter.all_gather_coalesced = partial(_Gathering, dtype=dtype)


def gather_groups(
    groups_flat: list[Tensor], partitioned_param_groups: list[list[Tensor]], **_: Any
) -> None:
    """At stages 1 and 2: make all parameter groups whole, in one collective and not one for each.

    groups_flat: each group's parameters, flat; partitioned_param_groups: views of each, by rank.
    """
    world = dist.group.WORLD
    if world is None or world.size() == 1:
        return
    own = [by_rank[dist.get_rank()] for by_rank in partitioned_param_groups]
    with clock.sending(sum(group.nbytes for group in groups_flat)):
        world.allgather_into_tensor_coalesced(groups_flat, own).wait()


def reduce_scatter(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """At stage 3: each tensor averaged over the ranks, [numel / ranks] of it; the last has less.

    DeepSpeed's cuts tensors in a loop over ranks: hundreds of thousands of views at 4,096.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sizes = [-(-tensor.numel() // ranks) for tensor in tensors]
    columns = [
        _padded(tensor.view(-1), size * ranks).view(ranks, size)
        for tensor, size in zip(tensors, sizes, strict=True)
    ]
    by_rank = torch.cat(columns, dim=1)
    by_rank.div_(ranks)
    comm.reduce_scatter_fn(by_rank[rank], by_rank.view(-1), group=group)
    parts = by_rank[rank].split(sizes)
    return [
        part[: max(tensor.numel() - rank * len(part), 0)]
        for tensor, part in zip(tensors, parts, strict=True)
    ]


def _padded(flat: Tensor, size: int) -> Tensor:
    return flat if len(flat) == size else functional.pad(flat, (0, size - len(flat)))


# A cached method of DeepSpeed's, inside its decorator.
_params_to_release: Any = inspect.getclosurevars(
    PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
).nonlocals["func"]

# DeepSpeed's own functions by these names are called for every engine of the process: all are ours.
stage_1_and_2.all_gather_dp_groups = gather_groups
stage3.reduce_scatter_coalesced = reduce_scatter


def _step_at_stage_3(wrapper: Any) -> None:
    """The parts of DeepSpeed's step, without its norm and its scaling of gradients."""
    untimed: set[str] = set()
    wrapper._pre_step()
    wrapper._partition_all_parameters()
    if not wrapper.offload_optimizer:
        wrapper.zero_grad(set_to_none=True)
    for group in range(len(wrapper.fp16_groups)):
        wrapper._prepare_sub_group(group, untimed)
        wrapper._optimizer_step(group)
        wrapper._reassign_or_swap_out_partitioned_parameters(group)
        wrapper._release_sub_group(group, untimed)
    wrapper._post_step(untimed)
    _let_gathers_wait(wrapper)


def _let_gathers_wait(wrapper: Any) -> None:
    """Have the next step's gathers, which have a stream of their own, read what this one writes.

    DeepSpeed has the host wait for the device instead, at the end of its own `all_gather`.
    """
    coordinator = wrapper.parameter_offload.get_param_coordinator()
    stream = coordinator._PartitionedParameterCoordinator__allgather_stream
    if stream is not None:
        stream.wait_stream(get_accelerator().current_stream())


def _let_the_device_wait(stream: Any) -> None:
    """Where DeepSpeed has the host wait for a stream, let the current stream do so instead."""
    stream.synchronize = lambda: get_accelerator().current_stream().wait_stream(stream)


@torch.no_grad()
def _gather_at_once(own: Any, param_list: Sequence[Any] | None = None) -> None:
    """Make partitioned parameters (None: `own`) whole, in one collective and not one for each."""
    missing = [p for p in param_list or [own] if _is_partitioned(p)]
    for parameter, whole in zip(missing, _gathered(missing), strict=True):
        parameter.data = whole
        parameter.ds_status = ZeroParamStatus.AVAILABLE


class _Gathering:
    """Partitioned parameters on their way to being whole; DeepSpeed waits before it uses them."""

    def __init__(
        self, parameters: Iterable[Any], quantize: bool = False, *, dtype: torch.dtype
    ) -> None:
        assert not quantize
        # DeepSpeed passes a set, whose order differs between ranks.
        self._parameters = sorted(parameters, key=lambda parameter: int(parameter.ds_id))
        self._by_rank, self._work = _gather(self._parameters, dtype)
        self._is_complete = False
        for parameter in self._parameters:
            parameter.ds_status = ZeroParamStatus.INFLIGHT

    @torch.no_grad()
    def wait(self, handle_dependency: bool = True) -> None:
        """Let the current stream wait for the parameters. It is called once for each of them."""
        if self._is_complete:
            return
        self._work.wait()
        whole_ones = _cut(self._by_rank.float(), self._parameters)
        for parameter, whole in zip(self._parameters, whole_ones, strict=True):
            parameter.data = whole
            parameter.ds_status = ZeroParamStatus.AVAILABLE
        self._is_complete = True
        del self._by_rank


@torch.no_grad()
def whole_copies(parameters: Sequence[Any]) -> list[Tensor]:
    """Copies of a stage-3 engine's parameters, whole on every rank. Collective."""
    gathered = iter(_gathered([p for p in parameters if _is_partitioned(p)]))
    return [next(gathered) if _is_partitioned(p) else p.detach().clone() for p in parameters]


def _is_partitioned(parameter: Any) -> bool:
    return bool(parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE)


def _gathered(parameters: Sequence[Any]) -> list[Tensor]:
    """Copies of parameters that are partitioned over all ranks, in one collective."""
    if not parameters:
        return []
    by_rank, work = _gather(parameters)
    work.wait()
    return _cut(by_rank, parameters)


@torch.no_grad()
def _gather(parameters: Sequence[Any], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Any]:
    """(what the ranks hold of the parameters, [ranks, n], and the collective that fills it)."""
    device = get_accelerator().current_device_name()
    mine = torch.cat([p.ds_tensor.data.view(-1).to(device, dtype) for p in parameters])
    by_rank = mine.new_empty(comm.get_world_size(), len(mine))
    return by_rank, comm.all_gather_into_tensor(by_rank.view(-1), mine, async_op=True)


def _cut(by_rank: Tensor, parameters: Sequence[Any]) -> list[Tensor]:
    """The parameters whole, from their parts [ranks, n]."""
    by_parameter = by_rank.split([p.ds_tensor.ds_numel for p in parameters], dim=1)
    return [
        whole.reshape(-1)[: p.ds_numel].view(p.ds_shape)
        for p, whole in zip(parameters, by_parameter, strict=True)
    ]
