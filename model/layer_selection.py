"""Making a shallower model from selected layers, one twice as deep, and one that is larger.

Layers are found by the names of their parameters, ``encoder.PART.N.`` (`model.protocol`).
"""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from model.config import EncoderConfig
from model.errors import ModelError
from model.initialisation import build, skeleton
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


def select_tokens(
    state: Mapping[str, Tensor], config: ModelConfig, tokens: Sequence[int]
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Configuration and state with these `tokens` of the vocabulary alone, in this order.

    Its predictions are those of the whole model, restricted to the tokens and renormalised. Raises
    ModelError where the padding token is none of them, or would move the positions.
    """
    if config.pad_token_id >= 0 and config.pad_token_id not in tokens:
        raise ModelError(f"pad_token_id: {config.pad_token_id} is no token of the tokenizer")
    selected = config.with_tokens(tokens)
    encoders = [model for model in (config, selected) if isinstance(model, EncoderConfig)]
    if len({encoder.first_position for encoder in encoders}) > 1:
        raise ModelError("positions: count from the padding token, whose number would change")
    expected, rows = skeleton(selected).state_dict(), torch.tensor(tokens)

    def cut(tensor: Tensor, shape: torch.Size) -> Tensor:
        for dimension, (before, now) in enumerate(zip(tensor.shape, shape, strict=True)):
            tensor = tensor if before == now else tensor.index_select(dimension, rows)
        return tensor

    return selected, {name: cut(state[name], like.shape) for name, like in expected.items()}


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


# What may differ between a model and a smaller one of which it is tiled.
TILED = ("hidden_size", "layers", "heads", "kv_heads", "ffn_size", "embedding_size", "global_every")


def cannot_tile(large: ModelConfig, small: ModelConfig) -> str:
    """Why the first weights of a model cannot be tiled from a smaller one's; empty if they can."""
    if not (isinstance(large, EncoderConfig) and isinstance(small, EncoderConfig)):
        return "is for encoders"
    if large.sharing != "none" or large.bottleneck_size or large.head_size != small.head_size:
        return (
            "is for models without shared layers or bottlenecks, and with heads of one size: "
            f"{large.head_size} here, {small.head_size} there"
        )
    free = {*TILED, *large.head_keys, *large.free_keys}
    ours, theirs = large.meaning(), small.meaning()
    for key in theirs.keys() - free:
        if ours.get(key) != theirs[key]:
            return f"needs an equal {key}: {ours.get(key)} here, {theirs[key]} there"
    for key in ("hidden_size", "layers", "ffn_size"):
        if getattr(large, key) < getattr(small, key):
            return f"needs {key} of {getattr(small, key)} or more, not {getattr(large, key)}"
    return ""


def tile(
    state: Mapping[str, Tensor], small: ModelConfig, large: ModelConfig, seed: int
) -> dict[str, Tensor]:
    """The state of a `large` model, tiled of a `small` one's; see `cannot_tile`.

    As ModernBERT-large begins (arXiv 2412.13663, section 2.2.3): the small tensor stands in the
    middle of the large one and repeats on all sides (Phi), and layer i of L begins as layer
    round(i * l / L) of l (Gopher, arXiv 2112.11446). A parameter that the small model does not
    have, such as the norm before its first attention, begins as in a random model of this `seed`.
    """
    first = build(large, seed).state_dict()
    tiled = {name: _tiled(state, small, large, name, begun) for name, begun in first.items()}
    return {name: first[name] if tensor is None else tensor for name, tensor in tiled.items()}


def _tiled(
    state: Mapping[str, Tensor], small: ModelConfig, large: ModelConfig, name: str, like: Tensor
) -> Tensor | None:
    if match := _LAYER.fullmatch(name):
        layer = min(round(int(match[2]) * small.layers / large.layers), small.layers - 1)
        name = f"encoder.{match[1]}.{layer}.{match[3]}"
    if name not in state:
        return None
    gated = isinstance(large, EncoderConfig) and large.feed_forward == "glu"
    parts = 2 if gated and ".stack." in name and ".input." in name else 1
    tensor = state[name]
    for dimension, size in enumerate(like.shape):
        pieces = tensor.chunk(parts if dimension == 0 else 1, dim=dimension)
        repeated = [_repeated(piece, dimension, size // len(pieces)) for piece in pieces]
        tensor = torch.cat(repeated, dim=dimension)
    return tensor


def _repeated(tensor: Tensor, dimension: int, size: int) -> Tensor:
    """The tensor in the middle of a dimension of this size, and repeated on both sides."""
    old = tensor.shape[dimension]
    index = (torch.arange(size) - (size - old) // 2) % old
    return tensor.index_select(dimension, index)


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
