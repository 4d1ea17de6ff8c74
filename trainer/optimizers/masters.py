"""Float32 masters of 16-bit weights at ZeRO stage 0, with float32 gradients.

At the other stages they are DeepSpeed's partitions. Its own optimizer of stage 0 adds gradients up
in 16 bit, and has the host wait for the device.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer.optimizers.gated import GatedOptimizer


class MasterOptimizer(GatedOptimizer):
    """Steps masters of the parameters, once there are any, and rounds these to the parameters."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.masters: dict[nn.Parameter, Tensor] = {}  # in the order of the groups

    def keep_masters(self) -> None:
        """Replace every parameter of the groups by a float32 copy, which its gradients go to.

        Call it once the parameters are on their device.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                master = self.masters[parameter] = parameter.detach().float()
                parameter.register_post_accumulate_grad_hook(partial(_accumulate, master))
            group["params"] = [self.masters[parameter] for parameter in group["params"]]

    def get_grads_for_reduction(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """The gradients that DeepSpeed averages over the ranks; those of experts, which are none.

        Where there is no gradient it is one of zeros, so that all ranks have as many.
        """
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [m.grad for m in self.masters.values() if m.grad is not None], {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of the masters and the parameters, or none when the step is skipped."""
        super().step(closure)
        self.round_masters()
        for master in self.masters.values():
            master.grad = None

    @torch.no_grad()
    def round_masters(self) -> None:
        """Set the parameters to their masters, rounded."""
        torch._foreach_copy_(list(self.masters), list(self.masters.values()))


def _accumulate(master: Tensor, parameter: Tensor) -> None:
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None
