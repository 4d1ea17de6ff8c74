"""Muon for the matrices of the layers, AdamW for everything else."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from configs.rules import PROBABILITY, OneOf, positive
from model.precision import is_native, rounded
from trainer.optimizers.config import KIND, MATRICES, AdamConfig, register_optimizer
from trainer.optimizers.moments import adam_updates, with_gradient
from trainer.optimizers.shards import Tensorwise, map_matrices, parameter_shapes, parameter_views

LAYERS = ("model.encoder.", "model.decoder.")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration in Jordan's code
ITERATIONS = 5


@register_optimizer
@dataclass
class MuonConfig(AdamConfig):
    """Muon (Jordan et al., https://kellerjordan.github.io/posts/muon) as `torch.optim.Muon`.

    The matrices of the layers take Nesterov momentum, orthogonalised by five Newton-Schulz
    iterations in bfloat16. AdamW updates embeddings, heads and vectors; `betas` and `epsilon`
    belong to AdamW. From ZeRO stage 1 on, ranks gather the momenta, and share the iterations.
    """

    kind: Annotated[str, OneOf("muon"), KIND] = "muon"
    momentum: Annotated[float, PROBABILITY, "The decay rate of the momentum, per step."] = 0.95
    scale: Annotated[
        str,
        OneOf("match_rms_adamw", "original"),
        "The factor on the rate of an m x n matrix. match_rms_adamw: 0.2 sqrt(max(m, n)), for "
        "AdamW's rates (Liu et al., arXiv 2502.16982); original: sqrt(max(1, m / n)).",
    ] = "match_rms_adamw"
    adamw_learning_rate: Annotated[
        float | None, positive(1e6), "The peak learning rate of AdamW's part; null: learning_rate."
    ] = None

    def settings(self, name: str, part: str) -> dict[str, Any]:
        is_hidden = part == MATRICES and name.startswith(LAYERS)
        states = ("momentum_buffer",) if is_hidden else self.states
        return {**super().settings(name, part), "states": states}

    def build(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        adamw = (self.adamw_learning_rate or self.learning_rate) / self.learning_rate
        return Muon(groups, self.learning_rate, self.momentum, self.scale, *self.moments, adamw)


class Muon(Tensorwise):
    """``w -= lr * (scale * NewtonSchulz(m) + decay * w)`` for groups with the state of a momentum.

    adamw_ratio: the other groups' rates as a multiple of ``lr``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float,
        scale: str,
        betas: tuple[float, float],
        eps: float,
        adamw_ratio: float,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._momentum, self._scale, self._adamw_ratio = momentum, scale, adamw_ratio

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient. Collective under ZeRO."""
        for group in self.param_groups:
            parameters = with_gradient(group)
            if not parameters:
                continue
            if "momentum_buffer" in group["states"]:
                self._step_matrices(group, parameters)
            else:
                rate = group["lr"] * self._adamw_ratio
                updates = adam_updates(self.state, group, parameters)
                torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
                torch._foreach_add_(parameters, updates, alpha=rate)

    def _step_matrices(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        updates = [self._advance(parameter) for parameter in parameters]
        map_matrices(self.shards, parameters, updates, orthogonalised)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        weights = parameter_views(self.shards, parameters, parameters)
        changes = parameter_views(self.shards, parameters, updates)
        shapes = parameter_shapes(self.shards, parameters)
        for weight, change, (rows, columns) in zip(weights, changes, shapes, strict=True):
            original = math.sqrt(max(1, rows / columns))
            scale = original if self._scale == "original" else 0.2 * math.sqrt(max(rows, columns))
            weight.add_(change, alpha=-group["lr"] * scale)

    def _advance(self, parameter: Tensor) -> Tensor:
        """Advance the momentum of a parameter; returns Nesterov's look-ahead."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        state["momentum_buffer"].lerp_(parameter.grad, 1 - self._momentum)
        return parameter.grad.lerp(state["momentum_buffer"], self._momentum)


def orthogonalised(matrix: Tensor) -> Tensor:
    """About the nearest matrix with orthonormal rows or columns, in bfloat16.

    A CPU without bfloat16 products multiplies the rounded values in float32, 15 times as fast.
    """
    a, b, c = COEFFICIENTS
    has_bf16 = is_native(matrix.device, torch.bfloat16)
    narrow = Tensor.bfloat16 if has_bf16 else partial(rounded, dtype=torch.bfloat16)
    x = narrow(matrix)
    is_tall = matrix.size(0) > matrix.size(1)
    if is_tall:
        x = x.T
    x = narrow(x / narrow(x.norm().clamp(min=1e-7)))
    for _ in range(ITERATIONS):
        gram = narrow(x @ x.T)
        x = narrow(
            torch.addmm(x, narrow(torch.addmm(gram, gram, gram, beta=b, alpha=c)), x, beta=a)
        )
    return (x.T if is_tall else x).bfloat16()
