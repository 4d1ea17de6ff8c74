"""StableAdamW: AdamW that clips the update of each parameter by its root mean square."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from configs.rules import PROBABILITY, Length, OneOf
from trainer.optimizers.config import KIND, AdamConfig, register_optimizer
from trainer.optimizers.moments import ScaledAdam


@register_optimizer
@dataclass
class StableAdamWConfig(AdamConfig):
    """StableAdamW (Wortsman et al., arXiv 2304.13013, algorithm 2), as in optimi and ModernBERT.

    The learning rate of a parameter is divided by the root mean square of its gradient over the
    root of the second moment, where that is above 1. It takes the place of `gradient_clipping`.
    """

    kind: Annotated[str, OneOf("stableadamw"), KIND] = "stableadamw"
    betas: Annotated[
        list[float], Length(2), PROBABILITY, "Decay rates of the first and second moment, per step."
    ] = field(default_factory=lambda: [0.9, 0.99])

    def build(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return StableAdamW(groups, self.learning_rate, *self.moments)


class StableAdamW(ScaledAdam):
    """``w -= r * (m / (sqrt(v) + eps) + decay * w)`` with moments corrected for bias.

    ``r = lr / max(1, RMS)``; RMS is the root of the mean of ``g^2 / max(v, eps^2)`` over a whole
    parameter.
    """

    scales_decay = True

    def measure(
        self, update: Tensor, gradient: Tensor, state: Mapping[str, Tensor], group: dict[str, Any]
    ) -> Tensor:
        correction = 1 - group["betas"][1] ** float(state["step"])
        second = (state["exp_avg_sq"] / correction).clamp_(min=group["eps"] ** 2)
        return second.rsqrt_().mul_(gradient)

    def factors(self, mean_squares: Tensor) -> Tensor:
        return mean_squares.sqrt().clamp(min=1.0).reciprocal()
