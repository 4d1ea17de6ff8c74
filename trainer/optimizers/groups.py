"""Parameter groups: which parameters decay, and which learn at a rate of their own."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn


class Rates(Protocol):
    """How much faster or slower some parameters learn than the schedule says.

    Pure functions, so that a resumed learner continues alike. A group whose factor is 0 stays as
    it is: no update, no decay, and its moments do not advance.
    """

    def group(self, parameter: str) -> str:
        """The group that a parameter, by its name in the learner's module, belongs to."""

    def factor(self, group: str, step: int) -> float:
        """What the learning rate of a group is multiplied by at the learner's 0-based `step`."""


def parameter_groups(module: nn.Module, weight_decay: float, rates: Rates) -> list[dict[str, Any]]:
    """The trained parameters by `rates.group`, and within it by whether they are matrices.

    Biases and norm parameters (one dimension) neither decay nor, under LAMB, get a trust ratio, as
    in BERT and in LAMB's original code. Keys: params, name, weight_decay, adaptive.
    """
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            key = rates.group(name), parameter.ndim >= 2
            groups.setdefault(key, []).append(parameter)
    return [
        {
            "params": parameters,
            "name": name,
            "weight_decay": weight_decay if is_matrix else 0.0,
            "adaptive": is_matrix,
        }
        for (name, is_matrix), parameters in groups.items()
    ]
