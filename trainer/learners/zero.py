"""DeepSpeed's ZeRO without host waits and loops over ranks or parameters: what is replaced.

| stage | replaced, for each engine | DeepSpeed 0.19.8 has instead |
|---|---|---|
| 1, 2 | the reduction of gradients | a hook for each parameter, which copies it to a bucket |
| 3 | the step | norms, clipping and overflows, which the learner has, and host waits for them |
| 3 | the gather of a layer, the reduction of gradients | views for every rank and parameter |
| 3 | the gather of parameters that stay whole | a collective for each of them |
| 3 | the device's wait for reductions | one of the host for each bucket |

At stages 1 and 2 the gradients of a backward pass are reduced at its end, as one flat tensor for
each parameter group. Beside an H200, DeepSpeed's hooks kept the host busy for longer than the GPU
takes for the backward pass of BERT-large (benchmarks/RESULTS.md). Ranks exchange half as many
bytes: a reduce-scatter in place of an all-reduce. In return, no exchange overlaps with the backward
pass, and gradients are whole until it ends.

At stage 3, a step of a tiny teacher and student on 2 ranks takes 5 host waits and 8 collectives
instead of 13 and 134. A step of a learner of 2 layers on 512 ranks takes 1,810 operators instead of
37,958, and 0.09 s of the host instead of 0.28 s. `tests/gpu_kit/test_step.py` fails if DeepSpeed
has caught up.

A release that is not in `TRIED` runs as it is, slower and with one line of warning; with
TANDEM_PLAIN_DEEPSPEED=1 every release does.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.nn import functional

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

TRIED = ("0.19.8",)  # releases whose private parts are those that are named below
_STAGE_3 = "_DeepSpeedZeroOptimizer_Stage3__"
_COORDINATOR = "_PartitionedParameterCoordinator__"
_log = logging.getLogger(__name__)


@cache
def replaces() -> bool:
    """Whether parts of DeepSpeed are replaced; the first call warns of a release not in `TRIED`."""
    release = deepspeed.__version__.partition("+")[0]
    if release not in TRIED:
        _log.warning(
            "DeepSpeed %s runs as it is: from zero_stage 1 on it is slower than %s, which is "
            "adapted, and at 3 it sends parameters as float32",
            release,
            " or ".join(TRIED),
        )
    return release in TRIED and os.environ.get("TANDEM_PLAIN_DEEPSPEED") != "1"


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
    # Not above: a release that has not been tried may lack it.
    from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup

    for group, part in enumerate(parts):
        wrapper.averaged_gradients[group] = GradPartitionBufferGroup([part], part)


def streamline(engine: DeepSpeedEngine) -> None:
    """Have a new engine that trains at stage 3 take its steps without host waits."""
    wrapper = engine.optimizer
    wrapper.step = partial(_step_at_stage_3, wrapper)
    setattr(wrapper, f"{_STAGE_3}avg_scatter_grads", partial(_average_and_scatter, wrapper))
    if wrapper.persistent_parameters:
        first = wrapper.persistent_parameters[0]  # DeepSpeed has it gather them all
        first.all_gather = partial(_gather_at_once, wrapper, first)
    if wrapper.reduce_and_partition_stream is not None:
        _let_the_device_wait(wrapper.reduce_and_partition_stream)


def forget(module: nn.Module) -> None:
    """Have DeepSpeed let go of a module whose engine, at stage 3, has been destroyed.

    DeepSpeed keeps it on a stack and in an unbounded cache, so it and its optimizer would never be
    freed.
    """
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [entry for entry in stack if entry is not module]
    if replaces():
        decorated = getattr(PartitionedParameterCoordinator, f"{_COORDINATOR}params_to_release")
        inspect.getclosurevars(decorated).nonlocals["func"].cache_clear()


def gather_flat(module: nn.Module, dtype: torch.dtype) -> None:
    """Have a module at stage 3 gather the parameters of its next layers as one flat tensor.

    They are sent as `dtype`, and have their own again on arrival. DeepSpeed cuts such a tensor in
    two loops over ranks, for each of its parameters.
    """
    parameters: Iterable[Any] = module.parameters()
    for parameter in parameters:
        parameter.all_gather_coalesced = partial(_Gathering, dtype=dtype)


def _average_and_scatter(
    wrapper: Any, parameters: Sequence[nn.Parameter], dtype: torch.dtype
) -> list[Tensor]:
    """The gradients averaged over the ranks, this rank's part of each; they are sent as `dtype`."""
    gradients = [parameter.grad.to(dtype) for parameter in parameters if parameter.grad is not None]
    return [part.to(wrapper.gradient_accumulation_dtype) for part in reduce_scatter(gradients)]


def reduce_scatter(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The mean of each tensor over the ranks, [numel / ranks] of it; the last rank has less."""
    ranks, rank = comm.get_world_size(), comm.get_rank()
    sizes = [-(-tensor.numel() // ranks) for tensor in tensors]
    columns = [
        _padded(tensor.view(-1), size * ranks).view(ranks, size)
        for tensor, size in zip(tensors, sizes, strict=True)
    ]
    by_rank = torch.cat(columns, dim=1)
    by_rank.div_(ranks)
    comm.reduce_scatter_fn(by_rank[rank], by_rank.view(-1))
    parts = by_rank[rank].split(sizes)
    return [
        part[: max(tensor.numel() - rank * len(part), 0)]
        for tensor, part in zip(tensors, parts, strict=True)
    ]


def _padded(flat: Tensor, size: int) -> Tensor:
    return flat if len(flat) == size else functional.pad(flat, (0, size - len(flat)))


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


def _let_gathers_wait(wrapper: Any) -> None:
    """Have the layers' next gathers, on their own stream, wait for the weights written so far.

    DeepSpeed has the host wait for the device instead, at the end of its own `all_gather`.
    """
    coordinator = wrapper.parameter_offload.get_param_coordinator()
    stream = getattr(coordinator, f"{_COORDINATOR}allgather_stream")
    if stream is not None:
        stream.wait_stream(get_accelerator().current_stream())


def _let_the_device_wait(stream: Any) -> None:
    """Let the current stream wait for a stream, where DeepSpeed has the host wait."""
    stream.synchronize = lambda: get_accelerator().current_stream().wait_stream(stream)


@torch.no_grad()
def _gather_at_once(wrapper: Any, first: Any, param_list: Sequence[Any] | None = None) -> None:
    """Make partitioned parameters (None: `first`) whole, in one collective and not one for each.

    It is called whenever weights have been written: by a step, by loading, by their averages.
    """
    _let_gathers_wait(wrapper)
    missing = [p for p in param_list or [first] if _is_partitioned(p)]
    for parameter, gathered in zip(missing, _gathered(missing), strict=True):
        parameter.data = gathered
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
        whole_ones = _cut(self._by_rank.to(self._parameters[0].dtype), self._parameters)
        for parameter, gathered in zip(self._parameters, whole_ones, strict=True):
            parameter.data = gathered
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
    by_rank, work = _gather(parameters, parameters[0].dtype)
    work.wait()
    return _cut(by_rank, parameters)


@torch.no_grad()
def _gather(parameters: Sequence[Any], dtype: torch.dtype) -> tuple[Tensor, Any]:
    """(what the ranks hold of the parameters, [ranks, n], and the collective that fills it)."""
    device = get_accelerator().current_device_name()
    mine = torch.cat([p.ds_tensor.data.view(-1).to(device, dtype) for p in parameters])
    by_rank = mine.new_empty(comm.get_world_size(), len(mine))
    return by_rank, comm.all_gather_into_tensor(by_rank.view(-1), mine, async_op=True)


def _cut(by_rank: Tensor, parameters: Sequence[Any]) -> list[Tensor]:
    """The parameters whole, from their parts [ranks, n]."""
    by_parameter = by_rank.split([p.ds_tensor.ds_numel for p in parameters], dim=1)
    return [
        gathered.reshape(-1)[: p.ds_numel].view(p.ds_shape)
        for p, gathered in zip(parameters, by_parameter, strict=True)
    ]
