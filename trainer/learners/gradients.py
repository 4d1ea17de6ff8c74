"""The norm of a learner's gradient, at every ZeRO stage, and clipping by it.

DeepSpeed's own norms take a collective for each parameter group, and the host waits for each. Here
every rank computes its part on the device, and the step adds up the parts of all learners at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.optimizers.norms import squared_norm

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def fill_gradients(engine: DeepSpeedEngine) -> None:
    """At stage 0: give a parameter without a gradient one of zeros.

    DeepSpeed does this at the other stages, and on several ranks.
    """
    for parameter in _stepped(engine):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _stepped(engine: DeepSpeedEngine) -> list[Tensor]:
    """The tensors that the optimizer steps at stage 0: the trained parameters, or their masters."""
    return [tensor for group in engine.optimizer.param_groups for tensor in group["params"]]


def squared_norm_part(engine: DeepSpeedEngine) -> Tensor:
    """This rank's part of the squared L2 norm of the gradient: float64 [], on the device.

    The sum over the ranks is the squared norm of the whole gradient, as the step's backward passes
    left it.
    """
    stage, wrapper = engine.zero_optimization_stage(), engine.optimizer
    if stage == 0:
        parameters = _stepped(engine) if dist.get_rank() == 0 else []  # all have the same
        return squared_norm([p.grad for p in parameters if p.grad is not None], engine.device)
    if _is_offloaded(engine):  # DeepSpeed took them on the way to the host
        norms = list(wrapper.norm_for_param_grads.values())
        none = torch.zeros((), dtype=torch.float64, device=engine.device)
        return torch.stack(norms).double().square().sum() if norms else none
    groups = wrapper.averaged_gradients.values()
    return squared_norm([part for group in groups for part in group], engine.device)


def _is_offloaded(engine: DeepSpeedEngine) -> bool:
    wrapper = engine.optimizer
    offloaded = "offload_optimizer" if engine.zero_optimization_stage() == 3 else "cpu_offload"
    return bool(getattr(wrapper, offloaded))


def gradient_factor(norm: float, clipping: float, scale: float) -> float:
    """The factor of gradients that divides out their `scale` and clips them.

    `norm` is the norm of the gradient without the scale. A clipping of 0 means no clipping. The
    formula is the one of `torch.nn.utils.clip_grad_norm_`.
    """
    clip = min(1.0, clipping / (norm + 1e-6)) if clipping else 1.0
    return clip / scale
