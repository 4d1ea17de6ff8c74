"""Cautious AdamW: only elements whose update agrees in sign with their gradient are updated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from configs.rules import OneOf
from trainer.optimizers.config import KIND, AdamConfig, register_optimizer
from trainer.optimizers.moments import ScaledAdam

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
