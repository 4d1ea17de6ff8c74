"""Adam as in BERT's code: AdamW without bias correction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from trainer.optimizers.moments import advance

# After this many steps Adam's correction of its moments' bias is 1 to the last bit.
LATE = 1e9


class BertAdam(torch.optim.Optimizer):
    """AdamW without bias correction (`AdamWeightDecayOptimizer` of google-research/bert).

    ``w -= lr * (m / (sqrt(v) + eps) + decay * w)``, where m and v begin at zero. It calls torch's
    fused AdamW with a step count so high that the bias correction vanishes.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            pairs = [(p, p.grad) for p in group["params"] if p.grad is not None]
            if not pairs:
                continue
            states = [advance(self.state[parameter], parameter) for parameter, _ in pairs]
            parameters, gradients = ([pair[n] for pair in pairs] for n in range(2))
            step_uncorrected(
                parameters, gradients, states, group, group["lr"], group["weight_decay"]
            )


def step_uncorrected(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    settings: Mapping[str, Any],
    lr: float,
    weight_decay: float,
) -> None:
    """One pass of torch's fused AdamW over the `parameters` and their moments, in place.

    `states` have the moments as in `advance`; `settings` have "betas" and "eps".
    """
    steps = torch.full((len(parameters),), LATE, device=parameters[0].device)
    adamw(
        list(parameters),
        list(gradients),
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        list(steps.unbind()),
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=settings["betas"][0],
        beta2=settings["betas"][1],
        lr=lr,
        weight_decay=weight_decay,
        eps=settings["eps"],
    )
