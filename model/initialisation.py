"""Initial weights: a pure function of the configuration and a seed."""

from __future__ import annotations

import hashlib

import torch

from model.model_config import ModelConfig
from model.protocol import Model
from model.skeleton import skeleton


def build(config: ModelConfig, seed: int) -> Model:
    """A model in training mode with initial weights, float32, on the CPU.

    Every parameter has its own generator, seeded by `seed` and its name. So its values do not
    depend on the global generator, on other parameters, on ranks or on the ZeRO stage.
    """
    model = empty(config)
    with torch.no_grad():
        for name, module in model.named_modules():
            for key, parameter in module.named_parameters(recurse=False):
                full_name = f"{name}.{key}"
                model.fill(module, key, full_name, parameter, _generator(seed, full_name))
    return model


def empty(config: ModelConfig) -> Model:
    """A model on the CPU with uninitialised weights."""
    return skeleton(config, "cpu")


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
