"""AdamW and its kin: the Adam of BERT's code, StableAdamW and cautious AdamW.

BERT's Adam is AdamW without bias correction. StableAdamW clips the update of each parameter by its
root mean square. Cautious AdamW leaves elements whose update and gradient differ in sign.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from configs.rules import PROBABILITY, Length, OneOf
from trainer.optimizers.config import KIND, AdamConfig, register_optimizer
from trainer.optimizers.moments import AdamSettings, ScaledAdam, advance, step_uncorrected


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


class BertAdam(AdamSettings):
    """AdamW without bias correction (`AdamWeightDecayOptimizer` of google-research/bert).

    ``w -= lr * (m / (sqrt(v) + eps) + decay * w)``, where m and v begin at zero. It calls torch's
    fused AdamW with a step count so high that the bias correction vanishes.
    """

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


LEAST = 1e-3  # of the elements, to which the others' share is given at most


@register_optimizer
@dataclass
class CautiousAdamWConfig(AdamConfig):
    """Cautious AdamW (Liang et al., arXiv 2411.16085), as in its code (C-AdamW) and timm.

    Elements whose first moment has another sign than their gradient are not updated. The updates of
    the other elements of the parameter are scaled up in proportion.
    """

    kind: Annotated[str, OneOf("cautious_adamw"), KIND] = "cautious_adamw"

    def build(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        return CautiousAdamW(groups, self.learning_rate, *self.moments)


class CautiousAdamW(ScaledAdam):
    """``w -= lr * (decay * w + u * c / max(mean(c), 0.001))``, where ``c`` is 1 or 0.

    ``u = m / (sqrt(v) + eps)`` with moments corrected for bias; ``c`` is 1 where ``u * g > 0``. The
    mean is that over a whole parameter.
    """

    scales_decay = False

    def measure(
        self, update: Tensor, gradient: Tensor, state: Mapping[str, Tensor], group: dict[str, Any]
    ) -> Tensor:
        agrees = (state["exp_avg"] * gradient > 0).to(update.dtype)
        update.mul_(agrees)
        return agrees

    def factors(self, mean_squares: Tensor) -> Tensor:
        return mean_squares.clamp(min=LEAST).reciprocal()
