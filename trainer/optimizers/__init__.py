"""Optimizers that are correct at every ZeRO stage."""

from __future__ import annotations

import torch
from torch import nn

from trainer.optimizers.bert_adam import BertAdam
from trainer.optimizers.config import OptimizerConfig
from trainer.optimizers.decoupled import Adadelta, Adamax
from trainer.optimizers.gated import GatedOptimizer
from trainer.optimizers.groups import Rates, parameter_groups
from trainer.optimizers.lamb import Lamb
from trainer.optimizers.shards import Shards

__all__ = [
    "Adadelta",
    "Adamax",
    "BertAdam",
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
    settings = (groups, config.learning_rate, betas, config.resolved_epsilon)
    if config.kind == "lamb":
        return GatedOptimizer(Lamb(*settings))
    if config.kind == "adamax":
        return GatedOptimizer(Adamax(*settings), ("exp_avg", "exp_inf"))
    if config.kind == "adadelta":
        return GatedOptimizer(Adadelta(*settings), ("square_avg", "acc_delta"))
    if not config.corrects_bias:
        return GatedOptimizer(BertAdam(*settings))
    # Fused: one pass over the weights; the default on a CPU makes ten passes and allocates arrays.
    return GatedOptimizer(torch.optim.AdamW(*settings, fused=True))
