"""A model's modules: without values, or with initial weights by configuration and seed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from model.model_config import ModelConfig
from model.protocol import Model, module_of


class _NoInitialisation(TorchFunctionMode):
    """Skips `torch.nn.init`: torch imports its compiler for it."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", "") == "torch.nn.init":
            tensor: Tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            return tensor
        return function(*args, **kwargs)


def skeleton(config: ModelConfig, device: str = "meta") -> Model:
    """The model of a configuration; on a device other than "meta" its weights are uninitialised."""
    with torch.device(device), _NoInitialisation():
        return module_of(config)(config)


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
