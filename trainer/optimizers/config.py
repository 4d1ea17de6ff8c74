"""The `optimizer` section of a learner."""

from __future__ import annotations

from dataclasses import dataclass, field

from configs import bounds
from configs.bounds import require_bounds, require_choice

# What each kind adds to the root of the second moment, where the config does not say.
EPSILONS = {"adamw": 1e-8, "lamb": 1e-6}


@dataclass
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) or LAMB (You et al., arXiv 1904.00962)."""

    kind: str = "adamw"
    learning_rate: float = 1e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    epsilon: float | None = None  # 1e-8 for adamw, 1e-6 for lamb
    weight_decay: float = 0.01
    bias_correction: bool | None = None  # of the moments: adamw's; BERT's Adam and lamb have none

    def __post_init__(self) -> None:
        """Refuse values that the optimizers are not defined for."""
        require_choice(self, kind=EPSILONS)
        require_bounds(self, learning_rate=bounds.positive(1e6), epsilon=bounds.positive(1.0))
        require_bounds(self, weight_decay=(0.0, 100.0))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError("betas: must be two numbers from 0 up to 1")
        if self.kind == "lamb" and self.bias_correction:
            raise ValueError("bias_correction: is for adamw, lamb has none; remove it")

    @property
    def resolved_epsilon(self) -> float:
        """`epsilon`, or what the kind of optimizer takes by itself."""
        return EPSILONS[self.kind] if self.epsilon is None else self.epsilon

    @property
    def corrects_bias(self) -> bool:
        """`bias_correction`, or what the kind of optimizer does by itself."""
        return self.kind == "adamw" if self.bias_correction is None else self.bias_correction
