"""Adam as in BERT's code: AdamW without bias correction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
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
            steps = torch.full((len(pairs),), LATE, device=pairs[0][0].device)
            adamw(
                [parameter for parameter, _ in pairs],
                [gradient for _, gradient in pairs],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                list(steps.unbind()),
                fused=True,
                amsgrad=False,
                maximize=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
            )
