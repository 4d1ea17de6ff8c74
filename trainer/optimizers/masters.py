"""Float32 masters of 16-bit weights at ZeRO stage 0, with float32 gradients.

At the other stages they are DeepSpeed's partitions. Its own optimizer of stage 0 adds gradients up
in 16 bit, and has the host wait for the device.
"""

from __future__ import annotations

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
        """Replace every parameter of the groups by a float32 copy.

        Call it once the parameters are on their device.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                self.masters[parameter] = parameter.detach().float()
            group["params"] = [self.masters[parameter] for parameter in group["params"]]

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Add the parameters' gradients to those of their masters, and drop them.

        Call it after each backward pass, since gradients of several add up in float32.
        """
        gradients = {p: p.grad for p in self.masters if p.grad is not None}
        if not gradients:
            return
        taken = [torch.empty_like(self.masters[parameter]) for parameter in gradients]
        torch._foreach_copy_(taken, [*gradients.values()])
        for parameter, gradient in zip(gradients, taken, strict=True):
            master, parameter.grad = self.masters[parameter], None
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    def get_grads_for_reduction(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """The gradients that DeepSpeed averages over the ranks; those of experts, which are none.

        Where there is no gradient it is one of zeros, so that all ranks have as many.
        """
        self.take_gradients()
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [m.grad for m in self.masters.values() if m.grad is not None], {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of the masters and the parameters, or none when the step is skipped."""
        self.take_gradients()
        super().step(closure)
        self.round_masters()
        for master in self.masters.values():
            master.grad = None

    @torch.no_grad()
    def round_masters(self) -> None:
        """Set the parameters to their masters, rounded."""
        torch._foreach_copy_(list(self.masters), list(self.masters.values()))
