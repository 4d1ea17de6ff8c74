"""Parameter groups: which parameters decay, and which have a learning rate of their own."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from trainer.optimizers.config import BIASES, EMBEDDINGS, MATRICES, NORMS, OptimizerConfig


class Rates(Protocol):
    """Factors on the scheduled learning rate, by group of parameters.

    These are pure functions, so that a resumed learner continues exactly. A group whose factor is 0
    is frozen: no update, no decay, and its moments do not advance.
    """

    def group(self, parameter: str) -> str:
        """The group of a parameter, given by its name in the learner's module."""

    def factor(self, group: str, step: int) -> float:
        """The factor on a group's learning rate at the learner's `step`, which counts from 0."""


def parameter_groups(
    module: nn.Module, config: OptimizerConfig, rates: Rates
) -> list[dict[str, Any]]:
    """The trained parameters, grouped by `rates.group` and by the optimizer's `settings`.

    As in BERT's and LAMB's original code, biases and norm parameters (one dimension) do not decay
    unless the config says so and, under LAMB, get no trust ratio. Keys of a group: params, name,
    and those of the settings.
    """
    tables = {
        id(parameter)
        for child in module.modules()
        if isinstance(child, nn.Embedding)
        for parameter in child.parameters(recurse=False)
    }
    groups: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            settings = config.settings(name, _part(name, parameter, id(parameter) in tables))
            groups.setdefault((rates.group(name), *settings.items()), []).append(parameter)
    return [
        {"params": parameters, "name": name, **dict(settings)}
        for (name, *settings), parameters in groups.items()
    ]


def _part(name: str, parameter: nn.Parameter, is_table: bool) -> str:
    """The part of the model (`PARTS`) that a parameter belongs to."""
    if parameter.ndim >= 2:
        return EMBEDDINGS if is_table else MATRICES
    return BIASES if name.rpartition(".")[2].startswith("bias") else NORMS
