"""Checks of a model folder's weights: the configuration's tensors, dense and finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from model.errors import ModelError
from model.initialisation import skeleton
from model.model_config import ModelConfig

Config = TypeVar("Config", bound=ModelConfig)
_MAX_SHARED_LAYERS = 1024  # a model can have more layers than tensors only by sharing
_LAYERS = ("num_hidden_layers", "n_layers", "layers")
_NETWORKS = ("num_feedforward_networks", "feed_forwards")


def refuse_implausible_depth(theirs: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Refuse huge layer counts before anything is allocated for them."""
    layers, networks = _largest(theirs, _LAYERS), _largest(theirs, _NETWORKS)
    if layers * networks > max(len(weights), _MAX_SHARED_LAYERS):
        raise ModelError(
            f"the configuration says {layers} layers of {networks} feed-forward networks each, "
            f"the weights have fewer"
        )


def refuse_extra_weights(
    config: Config, weights: Container[str], names: Callable[[Config], Iterable[str]]
) -> None:
    """Raise ModelError if the weights have more layers or networks than the configuration."""
    expected = set(names(config))
    keys = {field.name for field in dataclasses.fields(config)}
    for key in sorted(keys & {"layers", "feed_forwards"}, reverse=True):
        larger = dataclasses.replace(config, **{key: getattr(config, key) + 1})
        try:
            of_larger = names(larger)
        except ModelError:
            continue  # the family allows only one network per layer
        for name in of_larger:
            if name not in expected and name in weights:
                raise ModelError(
                    f"{key}: the configuration says {getattr(config, key)}, but the weights have "
                    f"more: {name}"
                )


def _largest(theirs: Mapping[str, Any], keys: Sequence[str]) -> float:
    """The largest number under any of these keys, at least 1."""
    return max([1, *(theirs[key] for key in keys if isinstance(theirs.get(key), (int, float)))])


def tensor_names(config: ModelConfig) -> list[str]:
    """The names of all tensors of a model with this configuration."""
    return list(skeleton(config).state_dict())


def checked_state(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state in float32. Raises ModelError if names, shapes or values do not fit."""
    expected = skeleton(config).state_dict()
    for name, tensor in expected.items():
        if name not in state:
            raise ModelError(f"the weights have no {name}")
        if not _is_plain(state[name]):
            raise ModelError(
                f"{name} is {state[name].dtype}, {state[name].layout}; "
                f"import the weights unquantised and dense"
            )
        if state[name].shape != tensor.shape:
            raise ModelError(
                f"{name} has shape {tuple(state[name].shape)}, "
                f"the configuration says {tuple(tensor.shape)}"
            )
    checked = {name: state[name].to(torch.float32) for name in expected}
    for name, tensor in checked.items():
        if not tensor.isfinite().all():
            raise ModelError(f"{name} holds NaN or infinity; its training or conversion failed")
    return checked


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is dense, floating-point and in memory."""
    return tensor.is_floating_point() and tensor.layout == torch.strided and not tensor.is_meta
