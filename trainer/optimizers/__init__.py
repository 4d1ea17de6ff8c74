"""Optimizers that are correct at every ZeRO stage; each is a module in `kinds`."""

from torch import nn

import trainer.optimizers.kinds  # noqa: F401 - registers them
from trainer.optimizers.config import (
    OptimizerConfig,
    Rates,
    optimizer_config,
    parameter_groups,
    register_optimizer,
)
from trainer.optimizers.gated import GatedOptimizer, MasterOptimizer
from trainer.optimizers.shards import Shards, Tensorwise

__all__ = [
    "GatedOptimizer",
    "MasterOptimizer",
    "OptimizerConfig",
    "Rates",
    "Shards",
    "Tensorwise",
    "build_optimizer",
    "optimizer_config",
    "parameter_groups",
    "register_optimizer",
]


def build_optimizer(
    module: nn.Module, config: OptimizerConfig, rates: Rates, *, masters: bool = False
) -> GatedOptimizer:
    """The optimizer of `module`, before DeepSpeed partitions its parameters.

    With `masters`, one that can keep masters itself (`MasterOptimizer`).
    """
    wrapper = MasterOptimizer if masters else GatedOptimizer
    return wrapper(config.build(parameter_groups(module, config, rates)))
