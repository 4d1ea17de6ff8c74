"""Parameter groups: which parameters decay, and which have a learning rate of their own."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn


class Rates(Protocol):
    """Factors on the scheduled learning rate, by group of parameters.

    These are pure functions, so that a resumed learner continues exactly. A group whose factor is 0
    is frozen: no update, no decay, and its moments do not advance.
    """

    def group(self, parameter: str) -> str:
        """The group of a parameter, given by its name in the learner's module."""

    def factor(self, group: str, step: int) -> float:
        """The factor on a group's learning rate at the learner's `step`, which counts from 0."""


def parameter_groups(module: nn.Module, weight_decay: float, rates: Rates) -> list[dict[str, Any]]:
    """The trained parameters, grouped by `rates.group` and by whether they are matrices.

    As in BERT's and LAMB's original code, biases and norm parameters (one dimension) do not decay
    and, under LAMB, get no trust ratio. Keys of a group: params, name, weight_decay, adaptive.
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
