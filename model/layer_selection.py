"""Making a shallower model from selected layers, and one that is twice as deep.

Layers are found by the names of their parameters, ``encoder.PART.N.`` (`model.protocol`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from model.errors import ModelError
from model.initialisation import build
from model.model_config import ModelConfig

_LAYER = re.compile(r"encoder\.(\w+)\.(\d+)\.(.+)")


def select_layers(
    state: Mapping[str, Tensor], layers: Sequence[int], config: ModelConfig | None = None
) -> dict[str, Tensor]:
    """The state of a model with only these 0-based `layers`, in this order, and all other parts.

    `config` describes the state; it is needed only if weights are shared in groups. Weights that
    all layers share stay shared. Tensors are not copied. Raises ModelError for a layer that the
    state does not have.
    """
    plans = _plans(state, config)
    depth = max(len(plan) for plan in plans.values())
    if not layers:
        raise ModelError("layers: select at least one layer")
    for layer in layers:
        if not 0 <= layer < depth:
            raise ModelError(f"layers: there is no layer {layer}; the model has 0 to {depth - 1}")
    selected = {name: value for name, value in state.items() if not _LAYER.fullmatch(name)}
    for name, value in state.items():
        match = _LAYER.fullmatch(name)
        if match is None:
            continue
        part, unit, rest = match[1], int(match[2]), match[3]
        plan = plans[part]
        for new, old in enumerate(layers if max(plan) or depth == 1 else [0]):
            if plan[old] == unit:
                selected[f"encoder.{part}.{new}.{rest}"] = value
    return selected


def double_layers(
    state: Mapping[str, Tensor], config: ModelConfig
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Configuration and state with twice the layers: layer i + L is a copy of layer i.

    In a pre-norm model the first layer may lack the norm before its attention. Its copy gets that
    norm with initial weights. `config` must not share weights in groups.
    """
    doubled = config.with_layers(2 * config.layers)
    selected = select_layers(state, [*range(config.layers)] * 2, config)
    initial = build(doubled, seed=0).state_dict()
    return doubled, {name: selected.get(name, tensor) for name, tensor in initial.items()}


def _plans(state: Mapping[str, Tensor], config: ModelConfig | None) -> dict[str, list[int]]:
    """The index of the weights that each layer uses, for each part of the layers."""
    units = _units(state)
    if config is not None:
        return {part: config.layer_units(part) for part in units}
    depth = max(units.values())
    return {part: [i if n == depth else 0 for i in range(depth)] for part, n in units.items()}


def _units(state: Mapping[str, Tensor]) -> dict[str, int]:
    """How many weights a state has for each part of the layers."""
    numbers: dict[str, int] = {}
    for match in filter(None, map(_LAYER.fullmatch, state)):
        numbers[match[1]] = max(numbers.get(match[1], 0), int(match[2]) + 1)
    if not numbers:
        raise ModelError("layers: this state has no encoder layers")
    return numbers
