"""Making a shallower model from selected layers, and one that is twice as deep."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from model.config import EncoderConfig, ModelError
from model.initialisation import build
from model.sharing import attention_units, feed_forward_units

_LAYER = re.compile(r"encoder\.(attention|feed_forward)\.(\d+)\.(.+)")


def select_layers(
    state: Mapping[str, Tensor], layers: Sequence[int], config: EncoderConfig | None = None
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
        kind, unit, rest = match[1], int(match[2]), match[3]
        plan = plans[kind]
        for new, old in enumerate(layers if max(plan) or depth == 1 else [0]):
            if plan[old] == unit:
                selected[f"encoder.{kind}.{new}.{rest}"] = value
    return selected


def double_layers(
    state: Mapping[str, Tensor], config: EncoderConfig
) -> tuple[EncoderConfig, dict[str, Tensor]]:
    """Configuration and state with twice the layers: layer i + L is a copy of layer i.

    In a pre-norm model the first layer may lack the norm before its attention. Its copy gets that
    norm with initial weights. `config` must not share weights in groups.
    """
    doubled = dataclasses.replace(config, layers=2 * config.layers)
    selected = select_layers(state, [*range(config.layers)] * 2, config)
    initial = build(doubled, seed=0).state_dict()
    return doubled, {name: selected.get(name, tensor) for name, tensor in initial.items()}


def _plans(state: Mapping[str, Tensor], config: EncoderConfig | None) -> dict[str, list[int]]:
    """The index of the weights that each layer uses, for attention and for feed-forward."""
    if config is not None:
        return {"attention": attention_units(config), "feed_forward": feed_forward_units(config)}
    units = {kind: _units(state, kind) for kind in ("attention", "feed_forward")}
    depth = max(units.values())
    return {kind: [i if n == depth else 0 for i in range(depth)] for kind, n in units.items()}


def _units(state: Mapping[str, Tensor], kind: str) -> int:
    numbers = [int(m[2]) for m in map(_LAYER.fullmatch, state) if m and m[1] == kind]
    if not numbers:
        raise ModelError("layers: this state has no encoder layers")
    return max(numbers) + 1
