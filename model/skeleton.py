"""A model's modules and shapes without initial values and, on "meta", without memory."""

from __future__ import annotations

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
