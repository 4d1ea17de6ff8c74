"""DeepSpeed's ZeRO without what costs a GPU's host a wait, or a learner a collective, for nothing.

Norms, clipping and overflows are the learner's own (`trainer.learners.gradients`), so DeepSpeed's
are left out of its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor

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
    device = get_accelerator().current_device_name()
    parts = [p.ds_tensor.data.view(-1).to(device) for p in parameters]
    mine = torch.cat(parts)
    everyone = mine.new_empty(comm.get_world_size(), len(mine))
    comm.all_gather_into_tensor(everyone, mine)
    by_parameter = everyone.split([len(part) for part in parts], dim=1)
    return [
        whole.reshape(-1)[: p.ds_numel].view(p.ds_shape)
        for p, whole in zip(parameters, by_parameter, strict=True)
    ]
