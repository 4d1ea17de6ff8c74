"""Optimizers: AdamW and LAMB, right at every ZeRO stage, and the groups their parameters are in."""

from __future__ import annotations

import torch
from torch import nn

from trainer.optimizers.config import OptimizerConfig
from trainer.optimizers.gated import GatedOptimizer
from trainer.optimizers.groups import Rates, parameter_groups
from trainer.optimizers.lamb import Lamb
from trainer.optimizers.shards import Shards

__all__ = [
    "GatedOptimizer",
    "Lamb",
    "OptimizerConfig",
    "Rates",
    "Shards",
    "build_optimizer",
]


def build_optimizer(module: nn.Module, config: OptimizerConfig, rates: Rates) -> GatedOptimizer:
    """The optimizer of `module`, before DeepSpeed partitions its parameters."""
    groups = parameter_groups(module, config.weight_decay, rates)
    betas = (config.betas[0], config.betas[1])
    settings = (groups, config.learning_rate, betas, config.smoothing)
    if config.kind == "lamb":
        return GatedOptimizer(Lamb(*settings))
    if not config.corrects_bias:
        # LAMB without its trust ratio is Adam as BERT's code has it (AdamWeightDecayOptimizer).
        for group in groups:
            group["adaptive"] = False
        return GatedOptimizer(Lamb(*settings))
    # Fused: one pass over the weights, where the default on a CPU makes ten and new arrays.
    return GatedOptimizer(torch.optim.AdamW(*settings, fused=True))
