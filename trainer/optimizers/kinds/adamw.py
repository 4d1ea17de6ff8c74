"""AdamW, and the Adam of BERT's code: AdamW without bias correction."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch

from configs.rules import OneOf
from trainer.optimizers.config import KIND, AdamConfig, register_optimizer
from trainer.optimizers.moments import advance, step_uncorrected


@register_optimizer
@dataclass
class AdamWConfig(AdamConfig):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101), by torch's fused kernel."""

    kind: Annotated[str, OneOf("adamw"), KIND] = "adamw"
    bias_correction: Annotated[
        bool, "Correct the bias of the moments; false: the Adam of BERT's code."
    ] = True

    def build(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        settings = (groups, self.learning_rate, *self.moments)
        if not self.bias_correction:
            return BertAdam(*settings)
        # Fused: one pass over the weights; the default on a CPU makes ten, and allocates arrays.
        return torch.optim.AdamW(*settings, fused=True)


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
